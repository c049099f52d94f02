"""The `cold` section: the object store, or directory, that has copies of snapshots."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from router.config import values
from router.config.loader import ConfigSection, Misfit


class ColdConfig(ConfigSection):
    """The cold tier; in YAML also just its `url`. Without `url` there is none."""

    url: Annotated[str, BeforeValidator(values.place_url)] | None = None
    endpoint: values.BaseUrl | None = None  # None: that of the provider
    region: values.Name | None = None
    key_file: values.AbsolutePath | None = None  # None: nothing is encrypted
    after_s: values.Seconds = Field(default=3600.0, alias="after")
    keep_s: values.PositiveSeconds = Field(default=15 * 24 * 3600.0, alias="keep")

    def overlaps(self, others: Iterable[Path | None]) -> list[Misfit]:
        """Return the contradiction if the tier's directory is one of others, or in one, or has one.

        In it what is old is removed.
        """
        if self.url is None or not self.url.startswith("/"):
            return []
        own = Path(self.url)
        for other in others:
            if other is not None and (own.is_relative_to(other) or other.is_relative_to(own)):
                message = f"overlaps with {other}: the cold tier needs a directory of its own"
                return [(("cold", "url"), message)]
        return []

    @model_validator(mode="before")
    @classmethod
    def _just_a_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    def misfits(self) -> Iterator[Misfit]:
        if self.url is None:
            return
        if self.endpoint is not None and not self.url.startswith("s3:"):
            yield ("endpoint",), "is for `url: s3://...` only"
        elif (
            self.endpoint is not None
            and self.key_file is None
            and can_be_read_on_the_way(self.endpoint)
        ):
            message = (
                "is http, which can be read on the way: use https, or encrypt with a `key_file`"
            )
            yield ("endpoint",), message


def can_be_read_on_the_way(endpoint: str) -> bool:
    """Return whether what is sent to a URL leaves this machine, and is not encrypted."""
    return endpoint.startswith("http:") and not values.is_local(urlsplit(endpoint).hostname or "")
