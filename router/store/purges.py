"""Purges of tenants, noted in each directory: a directory that was not open obeys them when it is.

No time decides: what a directory has of a tenant goes if it has no note of a purge that another
directory has a note of, whenever it was saved.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvError, KvFileError
from router.base.types import KvDir, Namespace, SnapshotId
from router.store.files import read_small, replace_small
from router.store.records import KvDirectory, StoredSnapshot

NAME = "purged-tenants.json"
_MOST = 1000  # notes; the oldest are dropped

_decode = json_decoder(dict[str, str])


class Purges:
    """The notes of all open directories, by id; each names a tenant."""

    def __init__(self, is_of: Callable[[Namespace, str], bool]) -> None:
        """Set up without notes. `is_of` says whether a namespace is a tenant's, with any salt."""
        self._is_of = is_of
        self._notes: dict[str, str] = {}
        self._noted: dict[KvDir, set[str]] = {}

    def __contains__(self, note: str) -> bool:
        return note in self._notes

    def add(self, note: str, tenant: str) -> None:
        """Add a purge, which no directory has a note of yet."""
        self._notes[note] = tenant
        while len(self._notes) > _MOST:
            del self._notes[next(iter(self._notes))]

    def read(self, directory: KvDirectory) -> KvDirectory:
        """Add the notes of a directory; return it. Blocks.

        Raises nothing: a directory without its notes obeys all.
        """
        found: dict[str, str] = {}
        with suppress(OSError, KvFileError, UndecodableError):
            found = _decode(read_small(directory.path / NAME))
        self._noted[directory.kv_dir] = set(found)
        for note, tenant in found.items():
            self.add(note, tenant)
        return directory

    async def obey(
        self,
        directories: Iterable[KvDirectory],
        held: Mapping[SnapshotId, StoredSnapshot],
        delete: Callable[[StoredSnapshot], Awaitable[None]],
    ) -> dict[KvDir, str]:
        """Delete what directories have of tenants that were purged while they were not open.

        Return those that cannot now, and why.
        """
        problems: dict[KvDir, str] = {}
        for directory in directories:
            noted = self._noted.get(directory.kv_dir, set())
            tenants = {tenant for note, tenant in self._notes.items() if note not in noted}
            if tenants and directory.threads.hangs:
                problems[directory.kv_dir] = "does not answer; it obeys when it does"
            if not tenants or directory.threads.hangs:
                continue
            for one in [one for one in held.values() if one.directory is directory]:
                if any(self._is_of(one.snapshot.namespace, tenant) for tenant in tenants):
                    await delete(one)
            try:
                await directory.threads.quick(partial(self.write, directory))
            except KvError as error:
                problems[directory.kv_dir] = str(error)
        return problems

    def write(self, directory: KvDirectory) -> None:
        """Note in a directory that it has obeyed all purges. Blocks. Raises OSError."""
        notes = dict(self._notes)
        replace_small(directory.path / NAME, msgspec.json.encode(notes))
        self._noted[directory.kv_dir] = set(notes)
