"""Names in the cold tier: what an object is called, and what the name of a state tells.

    states/TENANT/MODEL/ID.TOKENS.BYTES.DIGEST.MARKS    a manifest
    blobs/TENANT/AB/ABCD...                             the bytes of one blob
    purged/TENANT.RANDOM                                all of this tenant before it is to go

TENANT and MODEL are keyed hashes. One listing of `states/` tells every host what there is: MARKS
are hashes of the first 32, 64, 128, ... tokens, DIGEST is one of all tokens. No name tells a token.
Each tenant has blobs of its own, so that all of a tenant can be deleted by its prefix. Pure.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from msgspec import Struct

from router.base.prefix_hash import STEP, PrefixHasher
from router.base.tokens import Tokens, count
from router.base.types import Blob, Tenant

STATES, BLOBS, PURGED = "states/", "blobs/", "purged/"

_MARK_BYTES = 6  # a mark is a hint: another prompt with the same one costs a look, nothing else
_SALT = "~"  # behind it the salt of a tenant's prompts (core/model/tenancy.py)
_FOLDER_BYTES = 8
_STATE = re.compile(
    r"states/([0-9a-f]{16})/([0-9a-f]{16})/"
    r"([0-9a-f]{32})\.([0-9]{1,9})\.([0-9]{1,15})\.([0-9a-f]{16})\.([A-Za-z0-9_-]{8,160})"
)

StateKey = tuple[str, str, int, bytes]


class StateName(Struct, frozen=True):
    """What the name of a state tells of it. `tenant` and `model` are folders."""

    tenant: str
    model: str
    id: str
    n_tokens: int
    size_bytes: int
    digest: bytes
    marks: tuple[bytes, ...]

    @property
    def key(self) -> StateKey:
        """Return what is equal for states with the same tokens of one model and tenant."""
        return self.tenant, self.model, self.n_tokens, self.digest

    @property
    def path(self) -> str:
        """Return the name of its object."""
        marks = urlsafe_b64encode(b"".join(self.marks)).decode()
        numbers = f"{self.n_tokens}.{self.size_bytes}.{self.digest.hex()}"
        return f"{STATES}{self.tenant}/{self.model}/{self.id}.{numbers}.{marks}"


def read_state(path: str) -> StateName | None:
    """Return what the name of an object tells. None: it is none of a state."""
    found = _STATE.fullmatch(path)
    if found is None or len(found[7]) % 8:
        return None
    marks = urlsafe_b64decode(found[7])
    return StateName(
        tenant=found[1],
        model=found[2],
        id=found[3],
        n_tokens=int(found[4]),
        size_bytes=int(found[5]),
        digest=bytes.fromhex(found[6]),
        marks=tuple(marks[at : at + _MARK_BYTES] for at in range(0, len(marks), _MARK_BYTES)),
    )


def read_purge(path: str) -> str | None:
    """Return the folder of the tenant that was purged. None: it is the name of something else."""
    found = re.fullmatch(r"purged/([0-9a-f]{16})\.[0-9a-f]+", path)
    return None if found is None else found[1]


class Names:
    """Names under one key, which all hosts that share a cold tier have."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def tenant(self, tenant: Tenant) -> str:
        """Return the folder of a tenant; prompts with a `cache_salt` are in the same one."""
        return self._folder(b"tenant", tenant.partition(_SALT)[0])

    def model(self, facts: str) -> str:
        """Return the folder of a model. `facts`: the part of a namespace that all hosts share."""
        return self._folder(b"model", facts)

    def state(
        self, facts: str, tenant: Tenant, id: str, tokens: Tokens, size_bytes: int
    ) -> StateName:
        """Return the name of a state. Hashes all tokens: 1 ms for 32,000."""
        hasher = self.hasher(facts, tenant)
        return StateName(
            tenant=self.tenant(tenant),
            model=self.model(facts),
            id=id,
            n_tokens=count(tokens),
            size_bytes=size_bytes,
            digest=hasher.digest(tokens),
            marks=tuple(mark for _, mark in marks_of(hasher.hashes(tokens))),
        )

    def hasher(self, facts: str, tenant: Tenant) -> PrefixHasher:
        """Return what hashes the prompts of a model and tenant; a salt is a part of the tenant."""
        return PrefixHasher(self._key, facts, tenant)

    def blob(self, tenant: str, blob: Blob) -> str:
        """Return the name of a blob in the folder of a tenant."""
        name = blake2b(blob.id, key=self._key, digest_size=32).hexdigest()
        return f"{BLOBS}{tenant}/{name[:2]}/{name}"

    def _folder(self, kind: bytes, name: str) -> str:
        text = kind + b"\0" + name.encode()
        return blake2b(text, key=self._key, digest_size=_FOLDER_BYTES).hexdigest()


def marks_of(hashes: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers of tokens that have a mark, each with it: 32, 64, 128, ...

    `hashes`: as of `PrefixHasher.hashes`.
    """
    n = 1
    while n <= len(hashes):
        yield n * STEP, hashes[n - 1][:_MARK_BYTES]
        n *= 2
