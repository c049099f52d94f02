"""The cold tier: copies snapshots to it that are old enough, finds states there, and deletes them.

The tier holds nothing that a host depends on: what is missing, damaged or late is a miss. Blobs are
written before the state that needs them. Ages are by the clock of the place: an object that this
host has just written tells it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import structlog
from msgspec import Struct

from router.base.errors import KvError, KvFileError
from router.base.tasks import Tasks
from router.base.tokens import Tokens
from router.base.types import Blob, ColdStatus, Snapshot, SnapshotId, Tenant
from router.store import manifests
from router.store.blobs.blobs import BlobError, BlobReader
from router.store.blobs.buffer import Buffer
from router.store.cold.index import ColdIndex, ColdMatch
from router.store.cold.names import (
    BLOBS,
    CHECKS,
    PURGED,
    STATES,
    Names,
    StateKey,
    StateName,
    is_ours,
)
from router.store.io_pool import Threads
from router.store.places.directory import Directory
from router.store.places.place import MissingError, Place, clock
from router.store.places.seals import Sealed
from router.store.purges import FOLDER

if TYPE_CHECKING:
    from router.store.store import KvStore

T = TypeVar("T")

log = structlog.get_logger(__name__)

_LISTED_S = 300.0  # seconds between two listings
_LISTING_S = 600.0  # that one may take, or a deletion
_AGAIN_S = 30.0  # after a failure
_LOOK_S = (1.0, 60.0)  # the shortest and the longest time between two looks for what is due
_SWEPT_S = 24 * 3600.0
_CLOCKS_AGREE_S = 24 * 3600.0  # else nothing is removed for its age
_SEEN = 100_000  # blobs of which is known that they are there
_MOST_STATES = 30_000  # in the index, the newest: 3 KiB of memory each
_FAILED_S = 600.0  # until a snapshot is tried again that could not be copied
_FAILURES = 3  # of copies in a row: then the tier cannot be written
_ROUNDS = 3  # of a deletion, and the last one has to find nothing: a listing may be late
_UNSEEN = "not looked at yet"


class Owned(NamedTuple):
    """Whose a snapshot is: the part of its namespace that all hosts share, and its tenant."""

    facts: str
    tenant: Tenant


class KeptSnapshots(Protocol):
    """The snapshots of this host, and what else it has of tenants."""

    def snapshots(self) -> Iterable[Snapshot]:
        """Return all that are in use, the most valuable first."""

    def owned(self, snapshot: Snapshot) -> Owned:
        """Return whose a snapshot is."""

    def tenants(self) -> set[Tenant]:
        """Return the tenants of snapshots and slots."""

    async def purge(self, tenant: Tenant, note: str) -> None:
        """Delete all that is here of a tenant, and note that the purge was obeyed."""


class ColdSettings(Struct, frozen=True):
    """Settings of the tier. `after_s`: the age of what is copied there.

    `keep_s`: how long a state stays there; its blobs stay twice as long.
    """

    after_s: float = 3600.0
    keep_s: float = 15 * 24 * 3600.0


class ColdTier:
    """The tier of one host. Call `start` first, `aclose` last."""

    def __init__(
        self,
        place: Place,
        names: Names,
        seal: Sealed | None,
        store: "KvStore",
        kept: KeptSnapshots,
        settings: ColdSettings,
        wall_now: Callable[[], float],
    ) -> None:
        """`seal`: how objects are encrypted; None: they are not.

        `wall_now`: seconds since the epoch, as snapshots have them.
        """
        self._place, self.url = place, place.url
        self._names = names
        self._seal = seal
        self._store = store
        self._kept = kept
        self._settings = settings
        self._wall_now = wall_now
        # A directory has no rules that remove what is old, as buckets do.
        self._sweeps = isinstance(place, Directory)
        self._tasks = Tasks()
        # Apart: what a request waits for is not behind a listing or a copy.
        self._reads = Threads(place.url, lambda: None, self._tasks.spawn)
        self._works = Threads(place.url, lambda: None, self._tasks.spawn)
        self._fetches = Threads(place.url, lambda: None, self._tasks.spawn)
        self._index = ColdIndex()
        self._named: dict[SnapshotId, StateName] = {}  # of snapshots here
        self._young: set[StateKey] = set()  # states that need no writing again
        self._lost: dict[str, float] = {}  # states that could not be read: when they were written
        self._seen: set[str] = set()  # blobs
        self._failed: dict[SnapshotId, float] = {}  # until when not to copy them
        self._purging: Counter[str] = Counter()  # folders of tenants
        self._purges: Counter[str] = Counter()  # that have begun, of each folder
        self._doubted = asyncio.Event()
        self._putting = asyncio.Lock()  # of one object: a purge waits for its end
        self._store_now = 0.0
        self._listed_at: float | None = None
        self._swept_at: float | None = None
        self._counts: Counter[str] = Counter()
        self._waiting = 0
        self.problem = _UNSEEN  # why nothing is read
        self._unwritable = self._failure = ""  # why nothing, or the last snapshot, is not copied

    # -- what is there ---------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Return whether states can be read there, as far as is known."""
        return not self.problem and not self._reads.hangs

    def status(self) -> ColdStatus:
        """Return the state of the tier."""
        counts, problem = self._counts, self.problem or self._unwritable or self._failure
        if self._reads.hangs or self._works.hangs:
            problem = "it does not answer"
        return ColdStatus(
            url=self.url,
            problem=problem,
            states=len(self._index),
            state_bytes=self._index.total_bytes,
            waiting=self._waiting,
            copied=counts["copied"],
            written_bytes=counts["written"],
            skipped_bytes=counts["skipped"],
            fetched_bytes=counts["fetched"],
            damaged=counts["damaged"],
            missing=counts["missing"],
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

    async def manifest(self, state: StateName, owned: Owned) -> bytes:
        """Return the manifest of a state, as `manifests.encode` made it. Raises KvError."""
        try:
            sealed = await self._reads.bulk(partial(self._place.get, state.path))
            return await self._reads.bulk(partial(self._opened, state, owned, sealed))
        except KvFileError as error:
            await self.give_up(state, error)
            raise

    def _opened(self, state: StateName, owned: Owned, sealed: bytes) -> bytes:
        raw = sealed
        if self._seal is not None:
            opened = bytearray(max(len(sealed) - self._seal.sealed_bytes(0), 0))
            self._seal.open(state.path, memoryview(sealed), memoryview(opened))
            raw = bytes(opened)
        manifest = manifests.decode(raw, state.path)
        tokens, size_bytes = manifest.tokens, manifest.split.size_bytes
        if self._names.state(*owned, manifest.id, tokens, size_bytes) != state:
            raise KvFileError(f"{state.path} is of another state")
        return raw

    def reading(self, state: StateName, ends_at: float, now: Callable[[], float]) -> BlobReader:
        """Return the reader of a state's blobs, until `ends_at` in clock seconds."""

        def count() -> None:
            self._counts["fetched"] += made.done_bytes

        name_of, seal = partial(self._names.blob, state.tenant), self._seal
        made = BlobReader(
            self._place,
            name_of,
            seal=seal,
            ends_at=ends_at,
            now=now,
            close=count,
            threads=self._fetches,
        )
        return made

    async def give_up(self, state: StateName, error: KvFileError) -> None:
        """Forget a state that cannot be read, and delete it with its blob that is at fault.

        So a host that has it writes both again. Where nothing can be deleted, it is not used.
        """
        bad, missing = [state.path], isinstance(error, MissingError)
        if isinstance(error, BlobError):
            bad, missing = [*bad, self._names.blob(state.tenant, error.blob)], error.is_missing
        kind = "missing" if missing else "damaged"
        log.warning("cold_state_given_up", kind=kind, reason=str(error))
        self._counts[kind] += 1
        self._index.drop(state)
        self._young.discard(state.key)
        self._seen.difference_update(bad)
        self._lost[state.path] = self._store_now
        with suppress(KvError):
            await self._works.bulk(partial(self._place.delete, bad))

    def doubt(self) -> None:
        """Use the tier no more until it was listed again: a fetch has failed."""
        if not self.problem:
            self.problem = "a fetch has failed"
        self._doubted.set()

    # -- the loop --------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in the background until `aclose`."""
        self._tasks.supervise(self.run, name="cold tier")

    async def run(self) -> None:
        """List what is there, and copy what is due, for ever."""
        shortest_s, longest_s = _LOOK_S
        pause_s = min(max(self._settings.after_s / 10, shortest_s), longest_s)
        while True:
            self._doubted.clear()
            try:
                if self._is_due(self._listed_at, _LISTED_S) or self.problem:
                    await self.refresh()
            except KvError as error:
                if self.problem in ("", _UNSEEN):
                    log.warning("cold_tier_fails", url=self.url, reason=str(error))
                self.problem = str(error)
                self._waiting = len(await self._due()) + len(self._failed)
                await asyncio.sleep(_AGAIN_S)
                continue
            await self.copy_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._doubted.wait()

    async def aclose(self) -> None:
        """End what is under way; a thread that hangs goes on."""
        await self._tasks.aclose()
        self._reads.close()
        self._works.close()
        self._fetches.close()

    @property
    def works(self) -> bool:
        """Return whether a thread is at work, and may hang."""
        return any(one.works for one in (self._reads, self._works, self._fetches))

    def _is_due(self, last: float | None, period_s: float) -> bool:
        return last is None or asyncio.get_running_loop().time() - last >= period_s

    async def _slowly(self, function: Callable[[], T]) -> T:
        """Do long work in a thread. Raises KvError, also when it takes too long."""
        try:
            async with asyncio.timeout(_LISTING_S):
                return await self._works.unhurried(function)
        except TimeoutError:
            raise KvError(f"{self.url} does not answer") from None

    async def refresh(self) -> None:
        """Read what is there, by names alone; remove what is too old. Raises KvError.

        Where nothing can be written, what is there can still be read.
        """
        begun = asyncio.get_running_loop().time()
        try:
            self._store_now = await self._works.bulk(partial(clock, self._place))
            self._unwritable = ""
        except KvError as error:
            if not self._unwritable:
                log.warning("cold_tier_not_written", url=self.url, reason=str(error))
            self._store_now, self._unwritable = self._wall_now(), str(error)
        if self._sweeps and self._is_due(self._swept_at, _SWEPT_S):
            self._swept_at = begun
            await self._slowly(self._sweep)
        self._index, self._young, purges = await self._slowly(self._listed)
        self._seen.clear()
        await self._obey(purges)
        if self.problem:
            log.info("cold_tier_answers", url=self.url, states=len(self._index))
        self.problem, self._listed_at = "", begun

    def _listed(self) -> tuple[ColdIndex, set[StateKey], list[str]]:
        """Return what is there: the states, those that stay for a while, the purges."""
        now, keep_s = self._store_now, self._settings.keep_s
        found = [
            (meta, state)
            for meta in self._place.listing(STATES)
            if now - meta.changed_at < keep_s
            and self._lost.get(meta.name, meta.changed_at - 1) < meta.changed_at
            and (state := self._names.read_state(meta.name)) is not None
        ]
        found.sort(key=lambda one: one[0].changed_at)
        if len(found) > _MOST_STATES:
            log.warning("cold_states_left_out", states=len(found) - _MOST_STATES)
            del found[:-_MOST_STATES]
        young = {state.key for meta, state in found if now - meta.changed_at < keep_s / 2}
        index = ColdIndex(state for _, state in found)
        return index, young, [one.name for one in self._place.listing(PURGED)]

    def _sweep(self) -> None:
        """Remove what is too old: a directory has no rules for that, as buckets do.

        Only what has a name of ours, and only if the clock of the place can be right.
        """
        if abs(self._store_now - self._wall_now()) > _CLOCKS_AGREE_S:
            log.warning("cold_clock_differs", url=self.url, place=self._store_now)
            return
        for prefix, keeps in ((STATES, 1), (BLOBS, 2), (PURGED, 2), (CHECKS, 0)):
            oldest = self._store_now - keeps * self._settings.keep_s
            found = self._place.listing(prefix)
            self._place.delete(
                [one.name for one in found if one.changed_at < oldest and is_ours(one.name)]
            )

    # -- to the tier -----------------------------------------------------------------------------

    async def copy_due(self) -> None:
        """Copy all snapshots that are due, one after the other, until the next listing is due."""
        due, failures = await self._due(), 0
        self._waiting = len(due) + len(self._failed)
        if not self._failed:
            self._failure = ""
        if self._unwritable:
            return
        for snapshot in due:
            try:
                await self._copy(snapshot)
                failures, self._failure = 0, ""
            except _OwnError as error:  # deleted meanwhile, or damaged: not the tier's fault
                self._put_off(snapshot, error)
            except KvError as error:
                self._put_off(snapshot, error)
                failures, self._failure = failures + 1, str(error)
                if failures == _FAILURES:
                    self._unwritable = str(error)
                    return
                continue
            self._waiting -= 1
            if self._is_due(self._listed_at, _LISTED_S) or self.problem:
                return

    def _put_off(self, snapshot: Snapshot, error: Exception) -> None:
        log.warning("cold_copy_put_off", snapshot=snapshot.id, reason=str(error))
        self._failed[snapshot.id] = asyncio.get_running_loop().time() + _FAILED_S

    async def _due(self) -> list[Snapshot]:
        """Return the snapshots to copy."""
        oldest, now = self._wall_now() - self._settings.after_s, asyncio.get_running_loop().time()
        held = list(self._kept.snapshots())
        here = {snapshot.id for snapshot in held}
        self._named = {name: one for name, one in self._named.items() if name in here}
        self._failed = {n: at for n, at in self._failed.items() if at > now and n in here}
        unnamed = [(one, self._kept.owned(one)) for one in held if one.id not in self._named]
        self._named |= await asyncio.to_thread(self._names_of, unnamed)
        return [
            one
            for one in held
            if one.saved_at <= oldest and one.id not in self._failed and self._is_wanted(one)
        ]

    def _is_wanted(self, one: Snapshot) -> bool:
        """Return whether a snapshot can be found there, and is not there yet."""
        state = self._named[one.id]
        return bool(state.marks) and one.shape.extendable and state.key not in self._young

    def _names_of(
        self, snapshots: Iterable[tuple[Snapshot, Owned]]
    ) -> Mapping[SnapshotId, StateName]:
        return {
            one.id: self._names.state(*owned, one.id, one.tokens, one.size_bytes)
            for one, owned in snapshots
        }

    async def _copy(self, snapshot: Snapshot) -> None:
        """Write the blobs of a snapshot that are not there, then its state.

        Raises KvError; _OwnError if the snapshot cannot be read.
        """
        state = self._named[snapshot.id]
        before = self._purges[state.tenant]
        with _own_fault():
            manifest = await self._store.exchange.manifest(snapshot.id, hurried=False)
        for index, blob in enumerate(manifest.sized):
            path = self._names.blob(state.tenant, blob)
            if await self._is_there(path, blob):
                self._counts["skipped"] += blob.size_bytes
                continue
            with _own_fault():
                raw = await self._store.exchange.part(snapshot.id, index, hurried=False)
            await self._put(state.tenant, path, raw, before)
            self._saw(path)
        raw = memoryview(manifests.encode(manifest))
        await self._put(state.tenant, state.path, raw, before)
        self._lost.pop(state.path, None)
        self._index.add(state)
        self._young.add(state.key)
        self._counts["copied"] += 1

    async def _is_there(self, path: str, blob: Blob) -> bool:
        """Return whether a blob is there, and will be for as long as a new state may stay."""
        if path in self._seen:
            return True
        found = await self._works.bulk(partial(self._place.head, path))
        size = blob.size_bytes if self._seal is None else self._seal.sealed_bytes(blob.size_bytes)
        if found is None or found.size_bytes != size:
            return False
        if self._store_now - found.changed_at > self._settings.keep_s:
            return False
        self._saw(path)
        return True

    def _saw(self, path: str) -> None:
        if len(self._seen) >= _SEEN:
            self._seen.clear()
        self._seen.add(path)

    async def _put(self, tenant: str, path: str, raw: memoryview, before: int) -> None:
        """Write one object of a tenant, of which there were `before` purges. Raises KvError."""

        def put() -> int:
            sealed = raw if self._seal is None else self._seal.seal(path, raw, Buffer())
            self._place.put(path, sealed)
            return len(sealed)

        async with self._putting:
            if self._purging[tenant] or self._purges[tenant] != before:
                raise _OwnError("its tenant is being purged")
            self._counts["written"] += await self._works.unhurried(put)

    # -- to delete -------------------------------------------------------------------------------

    async def forget(self, snapshots: Iterable[Snapshot]) -> int:
        """Delete the states with the tokens of snapshots here; return how many there were.

        Their blobs stay until they are too old: other states may need them. Raises KvError, also if
        it is not known what is there.
        """
        if self.problem:
            raise KvError(self.problem)
        owned = [(one, self._kept.owned(one)) for one in snapshots]
        named = await asyncio.to_thread(self._names_of, owned)
        found = [
            state for name in named.values() if name.marks for state in self._index.equal(name)
        ]
        await self._works.bulk(partial(self._place.delete, [one.path for one in found]))
        for state in found:
            self._index.drop(state)
            self._young.discard(state.key)
        return len(found)

    async def purge(self, tenant: Tenant, note: str) -> int:
        """Delete all that a tenant has in the tier; return the number of objects.

        `note`: the id of the purge, 32 hex digits. Hosts that are down are told by an object: they
        delete what they have of before, and copy nothing of it. Raises KvError.
        """
        return await self._purge(self._names.tenant(tenant), note)

    async def _purge(self, folder: str, note: str) -> int:
        self._purging[folder] += 1
        self._purges[folder] += 1
        try:
            async with self._putting:
                now = await self._works.bulk(partial(clock, self._place))
                name = self._names.purge(folder, now, note)
                await self._works.bulk(partial(self._place.put, name, b"kvferry"))
            deleted = await self._clear(folder)
            await self._store.note_told([note])
            return deleted
        finally:
            self._purging[folder] -= 1

    async def _clear(self, folder: str, before: float | None = None) -> int:
        """Delete what a tenant has there, or what was written `before`; return how much."""
        deleted = await self._slowly(partial(self._delete_of, folder, before))
        if deleted:
            for state in self._index.states():
                if state.tenant == folder:
                    self._index.drop(state)
                    self._young.discard(state.key)
            self._seen.clear()
        return deleted

    def _delete_of(self, folder: str, before: float | None) -> int:
        """Delete the states of a tenant, then its blobs; return their number. Raises KvError."""
        deleted, names = set[str](), set[str]()
        for prefix in (f"{STATES}{folder}/", f"{BLOBS}{folder}/"):
            for _ in range(_ROUNDS):
                found = self._place.listing(prefix)
                names = {one.name for one in found if before is None or one.changed_at < before}
                if not names:
                    break
                self._place.delete(list(names))
                deleted |= names
            else:
                raise KvError(f"{len(names)} objects of the tenant could not be deleted")
        return len(deleted)

    async def _obey(self, paths: Iterable[str]) -> None:
        """Delete what this host has of tenants that were purged on another one, whenever it came.

        A host may have copied a state meanwhile. What was written in the first `after_s` seconds is
        of before the purge, whoever wrote it; both times are of the store. A purge that only this
        host knows of, of a run without the tier, is made up for.
        """
        purges = [one for path in paths if (one := self._names.read_purge(path))]
        here = {self._names.tenant(tenant): tenant for tenant in self._kept.tenants()}
        for folder, before, _ in purges:
            if self._store_now - before < self._settings.after_s + 2 * _LISTED_S:
                await self._clear(folder, before + self._settings.after_s)
        for folder, _, note in purges:
            if note not in self._store.purges:
                tenant = here.get(folder, Tenant(f"{FOLDER}{folder}"))
                log.info("purged_by_another_host", tenant=tenant)
                await self._kept.purge(tenant, note)
        there, untold = {one.id for one in purges}, self._store.purges.untold
        if heard := there & untold.keys():
            await self._store.note_told(heard)
        for note in untold.keys() - there if not self._unwritable else ():
            who = untold[note]
            is_folder = who.startswith(FOLDER)
            folder = who.removeprefix(FOLDER) if is_folder else self._names.tenant(Tenant(who))
            await self._purge(folder, note)


class _OwnError(Exception):
    """A snapshot here cannot be read, or is not to be copied: no fault of the tier."""


@contextmanager
def _own_fault() -> Iterator[None]:
    try:
        yield
    except KvError as error:
        raise _OwnError(str(error)) from error
