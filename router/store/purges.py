"""Purges of tenants, noted in each directory: a directory that was not open obeys them when it is.

No time decides: what a directory has of a tenant goes if it has no note of a purge that another
place has a note of, whenever it was saved. Places are directories, a list of this user, other hosts
and the cold tier.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog
import xxhash

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvError, KvFileError
from router.base.tasks import in_thread, within
from router.base.types import KvDir, Namespace, SnapshotId
from router.store.files import read_small, replace_small
from router.store.records import KvDirectory, StoredSnapshot

NAME = "purged-tenants.json"
_MOST = 10_000  # notes; a purge beyond drops the oldest
_PATIENCE_S = 60.0  # with one directory
_LIST_S = 5.0  # with the list
# Begins the folder of a tenant that nothing here was of when the cold tier told of its purge.
FOLDER = "#"
HERE = "here-"  # begins the id of a purge that other hosts and the cold tier need not obey

log = structlog.get_logger(__name__)

_decode = json_decoder(dict[str, str])


class Purges:
    """The notes of all open directories, and of others, by id; each names a tenant."""

    def __init__(self, is_of: Callable[[Namespace, str], bool], listed: Path | None = None) -> None:
        """Set up without notes. `is_of` says whether a namespace is a tenant's, with any salt.

        `listed`: the list of this user, for runs that have no directory in common.
        """
        self._is_of = is_of
        self._list = listed
        self._listed: dict[str, str] | None = None  # in the list; None: it was not read
        # The folder of a namespace's tenant in the cold tier. None: there is none.
        self.folder_of: Callable[[Namespace], str] | None = None
        self._notes: dict[str, str] = {}
        self._noted: dict[KvDir, set[str]] = {}
        self._turn = asyncio.Lock()

    def __contains__(self, note: str) -> bool:
        return note in self._notes

    @property
    def everywhere(self) -> dict[str, str]:
        """Return the purges that all hosts obey: the tenant of each, by the id of its note."""
        return {note: who for note, who in self._notes.items() if not note.startswith(HERE)}

    @property
    def digest(self) -> str:
        """Return a digest of their ids: hosts with the same one know the same purges."""
        return xxhash.xxh3_64_hexdigest("".join(sorted(self.everywhere)).encode())

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
        with suppress(OSError):
            found = _read(directory.path / NAME)
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
            await self._exchange()
            for directory in directories:
                noted = self._noted.get(directory.kv_dir, set())
                notes = {note: who for note, who in self._notes.items() if self._is_clear(who)}
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
            if any(self._owns(tenant, one.snapshot.namespace) for tenant in tenants):
                await delete(one)

    def _is_clear(self, tenant: str) -> bool:
        """Return whether it is known whose a purge is: a folder needs the cold tier."""
        return self.folder_of is not None or not tenant.startswith(FOLDER)

    def _owns(self, tenant: str, namespace: Namespace) -> bool:
        if tenant.startswith(FOLDER):
            assert self.folder_of is not None
            return self.folder_of(namespace) == tenant.removeprefix(FOLDER)
        return self._is_of(namespace, tenant)

    async def _exchange(self) -> None:
        """Read the list of this user once, and write what it lacks. Without it, all goes on."""
        path = self._list
        if path is None or self._listed == self._notes:
            return
        try:
            if self._listed is None:
                reading = in_thread(partial(_read, path), "purges")
                self._listed = await within(reading, _LIST_S, str(path))
                self._notes = self._listed | self._notes
            if self._listed != self._notes:
                notes = dict(self._notes)
                await within(in_thread(partial(_list, path, notes), "purges"), _LIST_S, str(path))
                self._listed = notes
        except (OSError, TimeoutError) as error:
            log.warning("purges_not_listed", file=str(path), reason=str(error))


def _read(path: Path) -> dict[str, str]:
    """Return the notes in a list; none where there is none, or a damaged one. Raises OSError."""
    try:
        return _decode(read_small(path))
    except (FileNotFoundError, KvFileError, UndecodableError):
        return {}


def _list(path: Path, notes: Mapping[str, str]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_small(path, msgspec.json.encode(notes))


def _write(directory: KvDirectory, notes: Mapping[str, str]) -> None:
    """Note in a directory that it has obeyed purges. Blocks. Raises OSError."""
    replace_small(directory.path / NAME, msgspec.json.encode(notes))
