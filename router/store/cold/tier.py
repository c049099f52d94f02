"""The cold tier: copies snapshots to it that are old enough, finds states there, and deletes them.

The store of the tier holds nothing that a host depends on: what is missing, damaged or late is a
miss. Blobs are written before the state that needs them. Ages are by the store's own clock: an
object that this host has just written tells it.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import structlog
from msgspec import Struct

from router.base.errors import KvError, KvFileError
from router.base.tasks import Tasks
from router.base.tokens import Tokens
from router.base.types import Blob, ColdStatus, Snapshot, SnapshotId, Tenant
from router.store.blobs import blob_files, manifests
from router.store.blobs.blob_files import Buffer
from router.store.blobs.exchange import Exchange
from router.store.cold.index import ColdIndex, ColdMatch
from router.store.cold.names import (
    BLOBS,
    PURGED,
    STATES,
    Names,
    StateKey,
    StateName,
    read_purge,
    read_state,
)
from router.store.cold.objects import MissingError, ObjectMeta, Objects
from router.store.cold.seals import Seal
from router.store.io_pool import Threads

log = structlog.get_logger(__name__)

_LISTED_S = 600.0  # seconds between two listings
_AGAIN_S = 30.0  # after a failure
_LOOK_S = (1.0, 60.0)  # the shortest and the longest time between two looks for what is due
_SWEPT_S = 24 * 3600.0
_UNSEEN = "not looked at yet"
_SEEN = 100_000  # blobs of which is known that they are there


class Owned(NamedTuple):
    """Whose a snapshot is: the part of its namespace that all hosts share, and its tenant."""

    facts: str
    tenant: Tenant


class KeptSnapshots(Protocol):
    """The snapshots of this host."""

    def snapshots(self) -> Iterable[Snapshot]:
        """Return all that are whole and in use, the most valuable first."""

    def owned(self, snapshot: Snapshot) -> Owned:
        """Return whose a snapshot is."""

    async def purged(self, snapshots: list[SnapshotId]) -> None:
        """Delete snapshots of a tenant that another host has purged."""


class ColdSettings(Struct, frozen=True):
    """Settings of the tier. `after_s`: the age of what is copied there.

    `keep_s`: how long a state stays there; its blobs stay twice as long.
    """

    after_s: float = 3600.0
    keep_s: float = 15 * 24 * 3600.0


@dataclass(slots=True)
class _Counts:
    states: int = 0  # copied
    bytes: int = 0  # written
    skipped_bytes: int = 0  # of blobs that were there
    fetched_bytes: int = 0
    damaged: int = 0
    missing: int = 0


class ColdTier:
    """The tier of one host. Call `start` first, `aclose` last."""

    def __init__(
        self,
        objects: Objects,
        names: Names,
        seal: Seal,
        exchange: Exchange,
        kept: KeptSnapshots,
        settings: ColdSettings,
        wall_now: Callable[[], float],
    ) -> None:
        """`wall_now`: seconds since the epoch, as snapshots have them."""
        self._objects = objects
        self._names = names
        self._seal = seal
        self._exchange = exchange
        self._kept = kept
        self._settings = settings
        self._wall_now = wall_now
        self._tasks = Tasks()
        self._threads = Threads(objects.place.url, lambda: None, self._tasks.spawn)
        self._index = ColdIndex()
        self._named: dict[SnapshotId, StateName] = {}  # of snapshots here
        self._young: set[StateKey] = set()  # states that need no writing again
        self._seen: set[str] = set()  # blobs
        self._lost: set[str] = set()  # names of states that could not be read
        self._purging: set[str] = set()  # folders of tenants
        self._purged: set[str] = set()  # names of purges that were carried out here
        self._doubted = asyncio.Event()
        self._writing = asyncio.Lock()  # of one state: a purge waits for its end
        self._store_now = 0.0
        self._listed_at: float | None = None
        self._swept_at: float | None = None
        self._counts = _Counts()
        self._waiting = 0
        self.problem = _UNSEEN

    # -- what is there ---------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Return whether states can be read there, as far as is known."""
        return not self.problem and not self._threads.hangs

    @property
    def url(self) -> str:
        """Return where the tier is."""
        return self._objects.place.url

    def status(self) -> ColdStatus:
        """Return the state of the tier."""
        counts = self._counts
        problem = "it does not answer" if self._threads.hangs else self.problem
        return ColdStatus(
            url=self.url,
            problem=problem,
            states=len(self._index),
            state_bytes=self._index.total_bytes,
            waiting=self._waiting,
            copied=counts.states,
            written_bytes=counts.bytes,
            skipped_bytes=counts.skipped_bytes,
            fetched_bytes=counts.fetched_bytes,
            damaged=counts.damaged,
            missing=counts.missing,
        )

    def find(self, owned: Owned, tokens: Tokens, *, goes_back: bool) -> ColdMatch | None:
        """Return the state that has most of a prompt. None: nothing of it is there."""
        if not self.is_usable or not len(self._index):
            return None
        names = self._names
        return self._index.find(
            names.tenant(owned.tenant),
            names.model(owned.facts),
            names.hasher(owned.facts, owned.tenant),
            tokens,
            goes_back=goes_back,
        )

    async def manifest(self, state: StateName) -> bytes:
        """Return the manifest of a state, as `manifests.encode` made it. Raises KvError."""
        try:
            sealed = await self._threads.bulk(partial(self._objects.get, state.path))
            return await asyncio.to_thread(self._opened, state, sealed)
        except KvFileError as error:
            await self._give_up(state, error)
            raise

    def _opened(self, state: StateName, sealed: bytes) -> bytes:
        size_bytes = len(sealed) - self._seal.sealed_bytes(0)
        raw = bytearray(max(size_bytes, 0))
        self._seal.open(state.path, memoryview(sealed), memoryview(raw))
        manifest = manifests.decode(bytes(raw), state.path)
        if (manifest.id, manifest.split.size_bytes) != (state.id, state.size_bytes):
            raise KvFileError(f"{state.path} is of another state")
        return bytes(raw)

    async def read_part(
        self, state: StateName, blob: Blob, into: memoryview, is_stopped: Callable[[], bool]
    ) -> None:
        """Read one blob of a state, checked. Raises KvError."""
        path = self._names.blob(state.tenant, blob)

        def read() -> None:
            size_bytes = self._seal.sealed_bytes(len(into))
            same = size_bytes == len(into)
            sealed = into if same else Buffer().of(size_bytes)
            self._objects.read(path, sealed, is_stopped)
            if not same:
                self._seal.open(path, sealed, into)
            if blob_files.blob_of(into) != blob:
                raise KvFileError(f"{path} has other content than its name says")

        try:
            await self._threads.bulk(read)
        except KvFileError as error:
            await self._damaged(state, path, error)
            raise
        self._counts.fetched_bytes += len(into)

    async def _give_up(self, state: StateName, error: KvFileError) -> None:
        """Forget a state that cannot be read, until this host writes it again."""
        kind = "missing" if isinstance(error, MissingError) else "damaged"
        log.warning("cold_state_given_up", kind=kind, reason=str(error))
        setattr(self._counts, kind, getattr(self._counts, kind) + 1)
        self._lost.add(state.path)
        self._index.drop(state)
        self._young.discard(state.key)

    async def _damaged(self, state: StateName, path: str, error: KvFileError) -> None:
        """Give up a state, and remove its blob that cannot be read, so that it is written anew."""
        self._seen.discard(path)
        await self._give_up(state, error)
        if not isinstance(error, MissingError):
            with suppress(KvError):
                await self._threads.bulk(partial(self._objects.delete, [path]))

    # -- the loop --------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in the background until `aclose`."""
        self._tasks.supervise(self.run, name="cold tier")

    async def run(self) -> None:
        """List what is there, and copy what is due, for ever."""
        shortest_s, longest_s = _LOOK_S
        pause_s = min(max(self._settings.after_s / 10, shortest_s), longest_s)
        while True:
            try:
                again = self._doubted.is_set() and self._is_due(self._listed_at, _AGAIN_S)
                if again or self._is_due(self._listed_at, _LISTED_S) or self.problem:
                    await self.refresh()
                self._doubted.clear()
                await self._copy_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._doubted.wait()
            except KvError as error:
                if self.problem in ("", _UNSEEN):
                    log.warning("cold_tier_fails", url=self.url, reason=str(error))
                self.problem = str(error)
                await asyncio.sleep(_AGAIN_S)

    def doubt(self) -> None:
        """Look soon whether the store answers: a fetch has failed."""
        self._doubted.set()

    async def aclose(self) -> None:
        """End what is under way; a thread that hangs goes on."""
        await self._tasks.aclose()
        self._threads.close()

    @property
    def works(self) -> bool:
        """Return whether a thread is at work, and may hang."""
        return self._threads.works

    def _is_due(self, last: float | None, period_s: float) -> bool:
        return last is None or asyncio.get_running_loop().time() - last >= period_s

    async def refresh(self) -> None:
        """Read what is there, by names alone. Raises KvError."""
        begun = asyncio.get_running_loop().time()
        listed = await self._threads.bulk(self._listed)
        self._store_now = listed.now
        self._index = listed.there
        self._young = listed.young
        for path in self._lost:
            state = read_state(path)
            if state is not None:
                self._index.drop(state)
                self._young.discard(state.key)
        self._seen.clear()
        await self._obey(listed.purges)
        if self.problem:
            log.info("cold_tier_answers", url=self.url, states=len(self._index))
        self.problem, self._listed_at = "", begun
        if self._objects.place.is_directory and self._is_due(self._swept_at, _SWEPT_S):
            self._swept_at = begun
            await self._threads.unhurried(partial(self._sweep, listed.now))

    def _listed(self) -> "_Listed":
        now, keep_s = self._objects.clock(), self._settings.keep_s
        found = [(read_state(meta.path), meta) for meta in self._objects.listing(STATES)]
        states = [
            (state, meta.changed_at)
            for state, meta in sorted(found, key=lambda one: one[1].changed_at)
            if state is not None and now - meta.changed_at < keep_s
        ]
        young = {state.key for state, at in states if now - at < keep_s / 2}
        index = ColdIndex(state for state, _ in states)
        return _Listed(now, index, young, self._objects.listing(PURGED))

    def _sweep(self, now: float) -> None:
        """Remove what is too old: a directory has no rules for that, as object stores do."""
        for prefix, keeps in ((STATES, 1), (BLOBS, 2), (PURGED, 2)):
            old = [
                one.path
                for one in self._objects.listing(prefix)
                if now - one.changed_at > keeps * self._settings.keep_s
            ]
            self._objects.delete(old)

    # -- to the tier -----------------------------------------------------------------------------

    async def _copy_all(self) -> None:
        """Copy all snapshots that are due, one after the other. Raises KvError."""
        while True:
            due = await self._due()
            self._waiting = len(due)
            if not due:
                return
            for snapshot in due:
                try:
                    async with self._writing:
                        await self._copy(snapshot)
                except (
                    KvFileError,
                    _OwnError,
                ) as error:  # deleted meanwhile, or damaged: not the tier's fault
                    log.info("cold_copy_given_up", snapshot=snapshot.id, reason=str(error))
                    self._young.add(self._named[snapshot.id].key)
                self._waiting -= 1
                if self._is_due(self._listed_at, _LISTED_S):
                    return

    async def _due(self) -> list[Snapshot]:
        oldest = self._wall_now() - self._settings.after_s
        held = list(self._kept.snapshots())
        here = {snapshot.id for snapshot in held}
        self._named = {name: state for name, state in self._named.items() if name in here}
        old = [one for one in held if one.saved_at <= oldest]
        new = [(one, self._kept.owned(one)) for one in old if one.id not in self._named]
        self._named |= await asyncio.to_thread(self._names_of, new)
        return [
            one
            for one in old
            if (state := self._named[one.id]).marks and state.key not in self._young
        ]

    def _names_of(
        self, snapshots: Iterable[tuple[Snapshot, Owned]]
    ) -> Mapping[SnapshotId, StateName]:
        return {one.id: self._name_of(one, owned) for one, owned in snapshots}

    def _name_of(self, one: Snapshot, owned: Owned) -> StateName:
        return self._names.state(owned.facts, owned.tenant, one.id, one.tokens, one.size_bytes)

    async def _copy(self, snapshot: Snapshot) -> None:
        """Write the blobs of a snapshot that are not there, then its state. Raises KvError."""
        state = self._named[snapshot.id]
        if state.tenant in self._purging:
            return
        with _own_fault():
            manifest = await self._exchange.manifest(snapshot.id)
        for index, blob in enumerate(manifest.sized):
            path = self._names.blob(state.tenant, blob)
            if await self._is_there(path, blob):
                self._counts.skipped_bytes += blob.size_bytes
                continue
            with _own_fault():
                raw = await self._exchange.part(snapshot.id, index, hurried=False)
            if state.tenant in self._purging:
                return
            await self._put(path, raw)
            self._seen.add(path)
        raw = memoryview(await asyncio.to_thread(manifests.encode, manifest))
        if state.tenant in self._purging:
            return
        await self._put(state.path, raw)
        self._lost.discard(state.path)
        self._index.add(state)
        self._young.add(state.key)
        self._counts.states += 1

    async def _is_there(self, path: str, blob: Blob) -> bool:
        """Return whether a blob is there, and will be for as long as a new state may stay."""
        if path in self._seen:
            return True
        found = await self._threads.bulk(partial(self._objects.head, path))
        if found is None or found.size_bytes != self._seal.sealed_bytes(blob.size_bytes):
            return False
        if self._store_now - found.changed_at > self._settings.keep_s:
            return False
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(path)
        return True

    async def _put(self, path: str, raw: memoryview) -> None:
        def put() -> int:
            sealed = self._seal.seal(path, raw, Buffer())
            self._objects.put(path, sealed)
            return len(sealed)

        self._counts.bytes += await self._threads.bulk(put)

    # -- to delete -------------------------------------------------------------------------------

    async def forget(self, snapshots: Iterable[Snapshot]) -> int:
        """Delete the states with the tokens of snapshots here; return how many there were.

        Their blobs stay until they are too old: other states may need them. Raises KvError.
        """
        owned = [(one, self._kept.owned(one)) for one in snapshots]
        names = await asyncio.to_thread(self._names_of, owned)
        async with self._writing:
            found = [one for name in names.values() if (one := self._index.equal(name))]
            for state in found:
                self._index.drop(state)
            paths = [state.path for state in found]
            return await self._threads.bulk(partial(self._objects.delete, paths))

    async def purge(self, tenant: Tenant) -> int:
        """Delete all that a tenant has in the tier; return the number of objects.

        Hosts that are down are told by an object: they delete what they have before it, and copy
        nothing of it. Raises KvError.
        """
        folder = self._names.tenant(tenant)
        self._purging.add(folder)
        try:
            async with self._writing:
                told = f"{PURGED}{folder}.{os.urandom(8).hex()}"
                self._purged.add(told)
                await self._threads.bulk(partial(self._objects.put, told, b"kvferry"))
                return await self._clear(folder)
        finally:
            self._purging.discard(folder)

    async def _clear(self, folder: str) -> int:
        """Delete all of a tenant; return the number of objects."""
        deleted = await self._threads.bulk(partial(self._delete_of, folder))
        for state in self._index.states():
            if state.tenant == folder:
                self._index.drop(state)
                self._young.discard(state.key)
        self._seen.clear()
        return deleted

    def _delete_of(self, folder: str) -> int:
        """Delete the states of a tenant, then its blobs, as none is left; return their number."""
        deleted = 0
        for prefix in (f"{STATES}{folder}/", f"{BLOBS}{folder}/"):
            while found := self._objects.listing(prefix):
                deleted += self._objects.delete([one.path for one in found])
        return deleted

    async def _obey(self, purges: Iterable[ObjectMeta]) -> None:
        """Delete what this host has of tenants that were purged on another one.

        A host may have copied a state meanwhile. Until `after_s` are over, all that is there of the
        tenant was saved before the purge.
        """
        left = {state.tenant for state in self._index.states()}
        for meta in purges:
            folder = read_purge(meta.path)
            if folder is None:
                continue
            if folder in left and self._store_now < meta.changed_at + self._settings.after_s:
                await self._clear(folder)
            if meta.path in self._purged:
                continue
            before = self._wall_now() - (self._store_now - meta.changed_at)
            doomed = [
                one.id
                for one in self._kept.snapshots()
                if one.saved_at <= before
                and self._names.tenant(self._kept.owned(one).tenant) == folder
            ]
            if doomed:
                log.info("purged_by_another_host", snapshots=len(doomed))
                await self._kept.purged(doomed)
            self._purged.add(meta.path)


class _OwnError(Exception):
    """A snapshot here cannot be read: no fault of the tier."""


@contextmanager
def _own_fault() -> Iterator[None]:
    try:
        yield
    except KvError as error:
        raise _OwnError(str(error)) from error


class _Listed(NamedTuple):
    """What is there. `now`: by the clock of the store; `young`: states that stay for a while."""

    now: float
    there: ColdIndex
    young: set[StateKey]
    purges: list[ObjectMeta]
