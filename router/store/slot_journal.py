"""Slot journal: what idle slots held, on disk, for a router that starts while its servers run.

A file for each slot, in the KV directory of its backend. An entry is good as long as the same
server process says that no task has run in the slot since: the ids of tasks only rise
(llama-server.md section 5.1). All functions block; call them in a thread.
"""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from router.base.decoding import UndecodableError, msgpack_decoder
from router.base.errors import KvFileError
from router.base.tokens import Tokens, count
from router.base.types import BackendId, KvDir, Namespace, Tenant
from router.store.files import read_small, replace_small

_NAME = re.compile(r"kvf-slot-(.+)-\d+\.journal")


class JournalEntry(Struct, frozen=True):
    """An idle slot: its server process, the last task in it, and what it holds."""

    process: tuple[str, ...]
    index: int
    id_task: int
    namespace: Namespace
    tenant: Tenant
    tokens: bytes
    unread: int = 0
    checkpoints: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens that the server reports for the slot."""
        return count(self.known) + self.unread

    @property
    def known(self) -> Tokens:
        """Return the tokens with known ids."""
        return Tokens(self.tokens)


_decode = msgpack_decoder(JournalEntry)
_CHECKSUM_BYTES = 16  # xxh3_128 of the rest: a flipped bit in a token would be believed


def write_entries(kv_dir: KvDir, backend: BackendId, entries: Sequence[JournalEntry]) -> None:
    """Write the entries of some slots of a backend. Raises OSError."""
    for entry in entries:
        # Not synced: after a crash of the machine the servers are gone as well.
        raw = msgspec.msgpack.encode(entry)
        replace_small(_path(kv_dir, backend, entry.index), xxhash.xxh3_128_digest(raw) + raw)


def read_entries(
    kv_dir: KvDir, backend: BackendId, process: tuple[str, ...], known: Collection[str]
) -> list[JournalEntry]:
    """Return the entries of a server process. Never raises.

    Remove those of other processes of the backend, and those of backends that are not `known`.
    """
    found = []
    with suppress(OSError):
        for path in Path(kv_dir).iterdir():
            named = _NAME.fullmatch(path.name)
            if named is None or (named.group(1) != backend and named.group(1) in known):
                continue
            entry = _read(path) if named.group(1) == backend else None
            if entry is not None and entry.process == process:
                found.append(entry)
            else:
                path.unlink(missing_ok=True)
    return found


def erase_entries(kv_dir: KvDir) -> None:
    """Remove the entries of all backends, for a purge. Raises OSError."""
    for path in Path(kv_dir).iterdir():
        if _NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _read(path: Path) -> JournalEntry | None:
    try:
        found = read_small(path)
        raw = found[_CHECKSUM_BYTES:]
        return _decode(raw) if xxhash.xxh3_128_digest(raw) == found[:_CHECKSUM_BYTES] else None
    except (OSError, KvFileError, UndecodableError):
        return None


def _path(kv_dir: KvDir, backend: BackendId, index: int) -> Path:
    return Path(kv_dir) / f"kvf-slot-{backend}-{index}.journal"
