"""The section `auth`: whose keys are good, and what tenants share. See `config`."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from router.base.api_keys import read_hash
from router.config import values as values
from router.config.loader import KeyPath, MisfitError, Section
from router.config.values import shown


class Sharing(StrEnum):
    """Whether what was computed for one tenant is reused for another."""

    NONE = "none"
    ALL = "all"


class Key(Section):
    """One key of one client. Its tenant is called like it, unless it says otherwise."""

    name: Annotated[str, BeforeValidator(values.tenant_name)]
    hash: Annotated[bytes, BeforeValidator(read_hash)] = Field(repr=False)
    tenant: Annotated[str, BeforeValidator(values.tenant_name)] = ""

    @model_validator(mode="before")
    @classmethod
    def _own_tenant(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("tenant") is None and "name" in value:
            return value | {"tenant": value["name"]}
        return value


class Tenant(Section):
    """Limits of one tenant; one that is not listed has none."""

    name: Annotated[str, BeforeValidator(values.tenant_name)]
    max_requests: values.PositiveCount | None = None  # running and waiting; None: no limit


class Auth(Section):
    """Who may use the router, and what they share. Without keys it is open to everybody."""

    keys: Annotated[tuple[Key, ...], BeforeValidator(values.entries)] = ()
    tenants: Annotated[tuple[Tenant, ...], BeforeValidator(values.entries)] = ()
    share_cache: Annotated[Sharing, BeforeValidator(partial(values.choice, kind=Sharing))] = (
        Sharing.NONE
    )

    @property
    def keeps_apart(self) -> bool:
        """Nothing of one tenant is used for another."""
        return bool(self.keys) and self.share_cache is Sharing.NONE

    @model_validator(mode="after")
    def _fits(self) -> "Auth":
        misfits = [
            *_twice("keys", "name", [key.name for key in self.keys]),
            *_twice("keys", "hash", [key.hash for key in self.keys]),
            *_twice("tenants", "name", [tenant.name for tenant in self.tenants]),
        ]
        known = {key.tenant for key in self.keys}
        for at, tenant in enumerate(self.tenants):
            if tenant.name not in known:
                message = f"{shown(tenant.name)} is the tenant of no key"
                misfits.append((("tenants", at, "name"), message))
        if misfits:
            raise MisfitError(misfits)
        return self


def _twice(section: str, field: str, found: Sequence[str | bytes]) -> list[tuple[KeyPath, str]]:
    """Entries that cannot be told apart. Hashes are not repeated."""
    seen: Counter[str | bytes] = Counter()
    misfits: list[tuple[KeyPath, str]] = []
    for at, value in enumerate(found):
        if seen[value]:
            what = "the same key" if isinstance(value, bytes) else shown(value)
            misfits.append(((section, at, field), f"{what} is listed twice"))
        seen[value] += 1
    return misfits
