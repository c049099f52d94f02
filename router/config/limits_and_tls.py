"""The edge in the configuration: what a client may send, who sees the router's own routes, TLS.

A part of `config.py`, which has the rest and what must fit together.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from router.config import values as values
from router.config.loader import MisfitError, Section
from router.config.values import NO_LIMIT, Address

KIB = 1024
MIB = 1024**2


def _most(value: object) -> int:
    """A whole number from 1 up; -1 stands for no limit."""
    if value == NO_LIMIT and isinstance(value, int):
        return NO_LIMIT
    try:
        return values.count(value, at_least=1)
    except ValueError:
        raise ValueError(
            f"must be a whole number of at least 1, or -1 (no limit), not {values.shown(value)}"
        ) from None


_Most = Annotated[int, BeforeValidator(_most)]


class Limits(Section):
    """What a client may send, and how long each step may take."""

    connections: _Most = 4096  # -1: no limit
    connections_per_client: _Most = NO_LIMIT
    max_request_line_bytes: values.PositiveSize = Field(default=8 * KIB, alias="max_request_line")
    max_header_bytes: values.PositiveSize = Field(default=16 * KIB, alias="max_header")
    max_headers: values.PositiveCount = 128
    header_timeout_s: values.PositiveSeconds = Field(default=15.0, alias="header_timeout")
    keep_alive_timeout_s: values.PositiveSeconds = Field(default=75.0, alias="keep_alive_timeout")
    max_body_bytes: values.PositiveSize = Field(default=64 * MIB, alias="max_body")
    body_timeout_s: values.PositiveSeconds = Field(default=60.0, alias="body_timeout")
    connect_timeout_s: values.PositiveSeconds = Field(default=5.0, alias="connect_timeout")
    first_byte_timeout_s: values.PositiveSeconds = Field(default=3600.0, alias="first_byte_timeout")
    idle_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="idle_timeout")
    send_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="send_timeout")
    control_timeout_s: values.PositiveSeconds = Field(default=10.0, alias="control_timeout")
    action_timeout_s: values.PositiveSeconds = Field(default=120.0, alias="action_timeout")


class Admin(Section):
    """Where the router's own routes are, and who may use them."""

    listen: Annotated[Address | None, values.optional(values.address)] = None  # None: with clients
    token_env: Annotated[str | None, values.optional(values.env_name)] = None
    protect_reads: Annotated[bool | None, values.optional(values.flag)] = None

    def protects_reads(self, *, has_keys: bool) -> bool:
        """Whether looking needs the token as well. `has_keys`: clients have to show keys, so what
        one of them may see is not for all who reach the port."""
        return has_keys if self.protect_reads is None else self.protect_reads

    @model_validator(mode="after")
    def _fits(self) -> "Admin":
        if self.protect_reads and self.token_env is None:
            message = "needs admin.token_env: the token that reading then takes"
            raise MisfitError([(("protect_reads",), message)])
        return self


class Tls(Section):
    """What the router shows to clients over TLS; both files, or neither: no TLS."""

    certificate: values.OptionalPath = None
    key: values.OptionalPath = None

    @model_validator(mode="after")
    def _fits(self) -> "Tls":
        for name, other in (("certificate", "key"), ("key", "certificate")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                raise MisfitError([((name,), f"is required with {other}: a file in PEM form")])
        return self
