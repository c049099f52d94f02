"""Purges of tenants, noted in each directory: a directory that was not open obeys them when it is.

No time decides: what a directory has of a tenant goes if it has no note of a purge that another
place has a note of, whenever it was saved. Places are directories, a list of this user, other hosts
and the cold tier. What others wrote is checked: a file may have been written by a llama-server.
"""

import asyncio
import re
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
from router.base.types import TENANT_SALT, KvDir, Namespace, SnapshotId, Tenant
from router.store.files import locked, put_whole, read_small
from router.store.records import KvDirectory, StoredSnapshot

NAME = "purged-tenants.json"
_MOST = 10_000  # notes; a purge of this host beyond drops the oldest
_PATIENCE_S = 60.0  # with one directory
_LIST_S = 5.0  # with the list
# Begins the folder of a tenant that nothing here was of when the cold tier told of its purge.
FOLDER = "#"
HERE = "here-"  # begins the id of a purge that other hosts and the cold tier need not obey
_TOLD = "told-"  # begins the id of a mark: the cold tier has heard of that purge
_NOTE = re.compile(f"(?:{HERE}|{_TOLD})?[0-9a-f]{{32}}")
_WHO = re.compile(f"[A-Za-z0-9._-]{{1,64}}|{FOLDER}[0-9a-f]{{16}}")

log = structlog.get_logger(__name__)

Notes = dict[str, str]
_decode = json_decoder(Notes)


class Purges:
    """The notes of all open directories, and of others, by id; each names a tenant."""

    def __init__(
        self, tenant_of: Callable[[Namespace], Tenant], listed: Path | None = None
    ) -> None:
        """Set up without notes. `tenant_of`: the tenant of a namespace, with its salt.

        `listed`: the list of this user, for runs that have no directory in common.
        """
        self._tenant_of = tenant_of
        self._list = listed
        self._listed: Notes | None = None  # what is in the list; None: it was not read
        # The folder of a tenant in the cold tier. None: there is none.
        self.folder_of: Callable[[Tenant], str] | None = None
        self._notes: Notes = {}
        self._digest: str | None = ""
        self._noted: dict[KvDir, set[str]] = {}
        self._turn = asyncio.Lock()

    def __contains__(self, note: str) -> bool:
        return note in self._notes

    @property
    def everywhere(self) -> Notes:
        """Return the purges that all places obey: the tenant of each, by the id of its note."""
        return {note: who for note, who in self._notes.items() if len(note) == 32}

    @property
    def by_name(self) -> Notes:
        """Return those of them that name a tenant, for other hosts."""
        return {note: who for note, who in self.everywhere.items() if not who.startswith(FOLDER)}

    @property
    def untold(self) -> Notes:
        """Return those of which the cold tier has not heard."""
        found = self.everywhere.items()
        return {note: who for note, who in found if f"{_TOLD}{note}" not in self._notes}

    @property
    def digest(self) -> str:
        """Return a digest of what other hosts are told; "" if that is nothing."""
        if self._digest is None:  # asked for each peer of each request
            told = "".join(sorted(self.by_name))
            self._digest = xxhash.xxh3_64_hexdigest(told.encode()) if told else ""
        return self._digest

    def add(self, note: str, tenant: str) -> None:
        """Add a purge, which no directory has a note of yet."""
        while len(self._notes) >= _MOST:
            del self._notes[next(iter(self._notes))]
        self._take({note: tenant})

    def tell(self, notes: Iterable[str]) -> None:
        """Mark purges of which the cold tier has heard."""
        self._take({f"{_TOLD}{note}": self._notes.get(note, "-") for note in notes})

    def _take(self, more: Mapping[str, str]) -> None:
        """Add sound notes, as long as there is room; a name replaces a folder."""
        self._digest = None
        for note, who in more.items():
            if not (_NOTE.fullmatch(note) and _WHO.fullmatch(who)):
                log.warning("purge_not_understood", note=note[:80])
            elif note not in self._notes:
                if len(self._notes) < _MOST:
                    self._notes[note] = who
            elif self._notes[note].startswith(FOLDER):
                self._notes[note] = who

    def read(self, directory: KvDirectory) -> KvDirectory:
        """Add the notes of a directory; return it. Blocks.

        Raises nothing: a directory without its notes obeys all.
        """
        found: Notes = {}
        with suppress(OSError):
            found = _read(directory.path / NAME)
        self._noted[directory.kv_dir] = set(found)
        self._take(found)
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
                fresh = {note: who for note, who in self._notes.items() if note not in noted}
                if self.folder_of is None:  # nobody knows whose a folder is
                    fresh = {n: who for n, who in fresh.items() if not who.startswith(FOLDER)}
                if not fresh:
                    continue
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._obey(directory, held, delete, fresh)
                        known = {n: self._notes[n] for n in self._notes if n in noted | set(fresh)}
                        await directory.threads.quick(partial(_write, directory, known))
                        self._noted[directory.kv_dir] = noted | set(fresh)
                except (KvError, TimeoutError) as error:
                    problems[directory.kv_dir] = str(error) or "it does not answer"
        return problems

    async def _obey(
        self,
        directory: KvDirectory,
        held: Mapping[SnapshotId, StoredSnapshot],
        delete: Callable[[StoredSnapshot], Awaitable[None]],
        fresh: Mapping[str, str],
    ) -> None:
        if directory.threads.hangs:
            raise KvError("does not answer; it obeys when it does")
        gone = {who for note, who in fresh.items() if not note.startswith(_TOLD)}
        here = [one for one in held.values() if one.directory is directory] if gone else []
        doomed = {
            name
            for name in {one.snapshot.namespace for one in here}
            if not gone.isdisjoint(self._names_of(self._tenant_of(name)))
        }
        for one in here:
            if one.snapshot.namespace in doomed:
                await delete(one)

    def _names_of(self, tenant: Tenant) -> set[str]:
        """Return what notes call a tenant: with its salt, without, and its folder."""
        names = {tenant, tenant.partition(TENANT_SALT)[0]}
        return names if self.folder_of is None else names | {f"{FOLDER}{self.folder_of(tenant)}"}

    async def _exchange(self) -> None:
        """Put the list of this user and the notes together. Without it, all goes on."""
        path = self._list
        if path is None or self._listed == self._notes:
            return
        try:
            working = in_thread(partial(_merge, path, dict(self._notes)), "purges")
            found = await within(working, _LIST_S, str(path))
        except (OSError, TimeoutError) as error:
            log.warning("purges_not_listed", file=str(path), reason=str(error))
        else:
            self._take(found)
            self._listed = dict(self._notes)


def _read(path: Path) -> Notes:
    """Return the notes in a file; none where there is none. A damaged one is set aside.

    Raises OSError.
    """
    try:
        return _decode(read_small(path))
    except FileNotFoundError:
        return {}
    except (KvFileError, UndecodableError) as error:
        log.warning("purges_damaged", file=str(path), reason=str(error))
        path.replace(path.with_name(f"{path.name}-damaged"))
        return {}


def _merge(path: Path, notes: Notes) -> Notes:
    """Add notes to a list that other routers of this user share; return all. Raises OSError."""
    if not notes and not path.exists():
        return {}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}-lock")):
        found = _read(path)
        if more := {n: who for n, who in notes.items() if found.get(n, FOLDER)[0] == FOLDER}:
            found |= more
            put_whole(path, msgspec.json.encode(found), fsync=True)
    return found


def _write(directory: KvDirectory, notes: Mapping[str, str]) -> None:
    """Note in a directory that it has obeyed purges. Blocks. Raises OSError."""
    put_whole(directory.path / NAME, msgspec.json.encode(notes))
