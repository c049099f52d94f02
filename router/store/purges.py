"""Purges of tenants, noted in each directory: a directory that was not open obeys them when it is.

No time decides: what a directory has of a tenant goes if it has no note of a purge that another
directory has a note of, whenever it was saved.
"""

import asyncio
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
_MOST = 10_000  # notes; a purge beyond drops the oldest
_PATIENCE_S = 60.0  # with one directory

_decode = json_decoder(dict[str, str])


class Purges:
    """The notes of all open directories, by id; each names a tenant."""

    def __init__(self, is_of: Callable[[Namespace, str], bool]) -> None:
        """Set up without notes. `is_of` says whether a namespace is a tenant's, with any salt."""
        self._is_of = is_of
        self._notes: dict[str, str] = {}
        self._noted: dict[KvDir, set[str]] = {}
        self._turn = asyncio.Lock()

    def __contains__(self, note: str) -> bool:
        return note in self._notes

    def add(self, note: str, tenant: str) -> None:
        """Add a purge, which no directory has a note of yet."""
        while len(self._notes) >= _MOST:
            del self._notes[next(iter(self._notes))]
        self._notes[note] = tenant

    def read(self, directory: KvDirectory) -> KvDirectory:
        """Add the notes of a directory; return it. Blocks.

        Raises nothing: a directory without its notes obeys all.
        """
        found: dict[str, str] = {}
        with suppress(OSError, KvFileError, UndecodableError):
            found = _decode(read_small(directory.path / NAME))
        self._noted[directory.kv_dir] = set(found)
        self._notes = self._notes | found
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
        async with self._turn:
            for directory in directories:
                notes, noted = dict(self._notes), self._noted.get(directory.kv_dir, set())
                tenants = {tenant for note, tenant in notes.items() if note not in noted}
                if not notes.keys() - noted:
                    continue
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._obey(directory, held, delete, tenants)
                        self._noted[directory.kv_dir] = set(notes)
                        await directory.threads.quick(partial(_write, directory, notes))
                except (KvError, TimeoutError) as error:
                    problems[directory.kv_dir] = str(error) or "it does not answer"
        return problems

    async def _obey(
        self,
        directory: KvDirectory,
        held: Mapping[SnapshotId, StoredSnapshot],
        delete: Callable[[StoredSnapshot], Awaitable[None]],
        tenants: set[str],
    ) -> None:
        if directory.threads.hangs:
            raise KvError("does not answer; it obeys when it does")
        for one in [one for one in held.values() if one.directory is directory]:
            if any(self._is_of(one.snapshot.namespace, tenant) for tenant in tenants):
                await delete(one)


def _write(directory: KvDirectory, notes: Mapping[str, str]) -> None:
    """Note in a directory that it has obeyed purges. Blocks. Raises OSError."""
    replace_small(directory.path / NAME, msgspec.json.encode(notes))
