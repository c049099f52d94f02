"""Names in the cold tier: what an object is called, and what the name of a state tells.

    states/TENANT/MODEL/ID.TOKENS.BYTES.DIGEST.MARKS.SIGN   a manifest
    blobs/TENANT/AB/ABCD...                                 the bytes of one blob
    purged/TENANT.TIME.NOTE.SIGN                            all of this tenant before it is to go

TENANT and MODEL are keyed hashes. One listing of `states/` tells every host what there is: MARKS
are hashes of the first 32, 64, 128, ... tokens, DIGEST is one of all tokens. No name tells a token.
SIGN is a keyed hash of all before it: who has not the key can neither invent nor change a name.
Each tenant has blobs of its own, so that all of a tenant can be deleted by its prefix. Pure.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from msgspec import Struct

from router.base.prefix_hash import STEP, PrefixHasher
from router.base.tokens import Tokens, count
from router.base.types import TENANT_SALT, Blob, Tenant

STATES, BLOBS, PURGED = "states/", "blobs/", "purged/"
CHECKS = "check/"  # of the doctor, and the clock

_MARK_BYTES = 6  # a mark is a hint: another prompt with the same one costs a look, nothing else
_FOLDER_BYTES = 8
_STATE = re.compile(
    r"states/([0-9a-f]{16})/([0-9a-f]{16})/"
    r"([0-9a-f]{32})\.([1-9][0-9]{0,8})\.([1-9][0-9]{0,14})\.([0-9a-f]{16})"
    r"\.((?:[A-Za-z0-9_-]{8}){1,16})\.([0-9a-f]{16})"
)
_BLOB = re.compile(r"blobs/[0-9a-f]{16}/([0-9a-f]{2})/\1[0-9a-f]{62}")
_PURGE = re.compile(r"purged/([0-9a-f]{16})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{16})")
_CHECK = re.compile("check/([0-9a-f]{16}|clock)")
_BROKEN = re.compile(r"-[0-9a-f]{8}\.new")  # ends the name of a write that did not end

StateKey = tuple[str, str, int, bytes]


class StateName(Struct, frozen=True):
    """What the name of a state tells of it. `tenant` and `model` are folders; `path`: the name."""

    tenant: str
    model: str
    id: str
    n_tokens: int
    size_bytes: int
    digest: bytes
    marks: tuple[bytes, ...]
    path: str

    @property
    def key(self) -> StateKey:
        """Return the key of all states with the same tokens of one model and tenant."""
        return self.tenant, self.model, self.n_tokens, self.digest


class PurgeNote(NamedTuple):
    """All that the tenant of a folder had before a time, by the place's clock, is to go.

    `id`: of the purge, the same at all places.
    """

    tenant: str
    before: float
    id: str


def is_ours(path: str) -> bool:
    """Return whether an object is one of a cold tier, whoever has its key, or is a broken write."""
    whole = _BROKEN.sub("", path)
    return any(one.fullmatch(whole) is not None for one in (_STATE, _BLOB, _PURGE, _CHECK))


class Names:
    """Names under one key, which all hosts that share a cold tier have."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def tenant(self, tenant: Tenant) -> str:
        """Return the folder of a tenant; prompts with a `cache_salt` are in the same one."""
        return self._folder(b"tenant", tenant.partition(TENANT_SALT)[0])

    def model(self, facts: str) -> str:
        """Return the folder of a model. `facts`: the part of a namespace that all hosts share."""
        return self._folder(b"model", facts)

    def state(
        self, facts: str, tenant: Tenant, id: str, tokens: Tokens, size_bytes: int
    ) -> StateName:
        """Return the name of a state. Hashes all tokens: 1 ms for 32,000."""
        hasher = self.hasher(facts, tenant)
        marks = tuple(mark for _, mark in marks_of(hasher.hashes(tokens)))
        folders, digest = (self.tenant(tenant), self.model(facts)), hasher.digest(tokens)
        numbers = f"{count(tokens)}.{size_bytes}.{digest.hex()}"
        told = f"{STATES}{'/'.join(folders)}/{id}.{numbers}.{_text(marks)}"
        path = f"{told}.{self._sign(told)}"
        return StateName(*folders, id, count(tokens), size_bytes, digest, marks, path)

    def read_state(self, path: str) -> StateName | None:
        """Return the state of an object's name. None: it is none of a state, or not ours."""
        found = _STATE.fullmatch(path)
        if found is None or found[8] != self._sign(path.rpartition(".")[0]):
            return None
        raw, size = urlsafe_b64decode(found[7]), _MARK_BYTES
        marks = tuple(raw[at : at + size] for at in range(0, len(raw), size))
        numbers, digest = (int(found[4]), int(found[5])), bytes.fromhex(found[6])
        return StateName(found[1], found[2], found[3], *numbers, digest, marks, path)

    def purge(self, folder: str, at: float, note: str) -> str:
        """Return the name that tells of a purge of a tenant's folder."""
        told = f"{PURGED}{folder}.{int(at) + 1}.{note}"
        return f"{told}.{self._sign(told)}"

    def read_purge(self, path: str) -> PurgeNote | None:
        """Return the purge of an object's name. None: it is none, or not ours."""
        found = _PURGE.fullmatch(path)
        if found is None or found[4] != self._sign(path.rpartition(".")[0]):
            return None
        return PurgeNote(found[1], float(found[2]), found[3])

    def hasher(self, facts: str, tenant: Tenant) -> PrefixHasher:
        """Return the hasher of a model's and tenant's prompts; a salt is a part of the tenant."""
        return PrefixHasher(self._key, facts, tenant)

    def blob(self, tenant: str, blob: Blob) -> str:
        """Return the name of a blob in the folder of a tenant."""
        name = blake2b(blob.id, key=self._key, digest_size=32).hexdigest()
        return f"{BLOBS}{tenant}/{name[:2]}/{name}"

    def _sign(self, told: str) -> str:
        return blake2b(told.encode(), key=self._key, digest_size=8, person=b"name").hexdigest()

    def _folder(self, kind: bytes, name: str) -> str:
        text = kind + b"\0" + name.encode()
        return blake2b(text, key=self._key, digest_size=_FOLDER_BYTES).hexdigest()


def _text(marks: Sequence[bytes]) -> str:
    return urlsafe_b64encode(b"".join(marks)).decode()


def marks_of(hashes: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers of tokens that have a mark, each with it: 32, 64, 128, ...

    `hashes`: as of `PrefixHasher.hashes`.
    """
    n = 1
    while n <= len(hashes):
        yield n * STEP, hashes[n - 1][:_MARK_BYTES]
        n *= 2
