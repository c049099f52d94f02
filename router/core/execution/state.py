"""State that the scheduler owns, and the few operations on it that every part uses."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from router.base.errors import RouterError
from router.base.types import (
    NO_KEEP,
    BackendId,
    Keep,
    MemoryKind,
    RequestId,
    Snapshot,
    SnapshotId,
    Stall,
)
from router.core.inventory.inventory import Inventory
from router.core.model.effects import Delete, Effect, Order, Reject
from router.core.model.jobs import RequestJob
from router.core.model.request_queue import Queue
from router.core.model.servers import Server
from router.core.model.tenancy import Budget
from router.core.model.tuning import TUNING
from router.core.planning.pricing import worth_of


@dataclass(slots=True)
class State:
    """Inventory and queue; `out` collects the effects of the current fact."""

    inventory: Inventory = field(default_factory=Inventory)
    now: float = 0.0  # of the fact that is taken in, in clock seconds
    queue: Queue = field(default_factory=Queue)
    budget: Budget = field(default_factory=Budget)
    unexplained: list[RequestJob] = field(default_factory=list)  # admitted by the last fact
    # Orders that are carried out, by identity, and the steps that await them. A job that ends with
    # its backend leaves its last one here, with the snapshot that is still being read.
    under_way: dict[int, tuple[Order[Any], Coroutine[Any, Any, None]]] = field(default_factory=dict)
    # Steps of the jobs in a prefill queue or at a placement gate, until it is their turn.
    turns: dict[RequestJob, Coroutine[Any, Any, None]] = field(default_factory=dict)
    scanned: set[RequestId] = field(default_factory=set)  # queued requests planned in this round
    dirty: bool = False  # slots or queue changed since the first request of this scan was planned
    resume_scan_at: float | None = None  # clock seconds: plan the next then
    unserved: dict[str | None, float] = field(default_factory=dict)  # see admission.note_unserved
    plan_servers_at: float = inf  # clock seconds: see server_swaps.settle
    stopping: bool = False
    saves_on_stop: bool = True
    idle_saves_at: float = inf  # clock seconds: look at the idle slots then, or later
    backoffs_end_at: float = inf  # clock seconds: the next write backoff ends
    saves: int = 0  # idle saves so far; numbers their jobs
    out: list[Effect] = field(default_factory=list)

    def stalled(self, backend: BackendId, stall: Stall, seconds: float) -> None:
        """Add `seconds` of stall for each stream that runs on the backend."""
        there = self.inventory.backends[backend]
        stalled_s = seconds * there.running
        there.stalled_s[stall] = there.stalled_s.get(stall, 0.0) + stalled_s

    def reject(self, request: RequestId, error: RouterError) -> None:
        """Reject the request: its client gets `error`."""
        self.out.append(Reject(request, error))

    def write_failed(self, backend: BackendId, now: float, reason: str) -> None:
        """Count a failed save or rewrite of state files for a backend."""
        if backend in self.inventory.up:  # else it failed because the backend went down
            backoff = self.inventory.backends[backend].backoff
            backoff.fail(now, reason)
            if backoff.until is not None:
                self.backoffs_end_at = min(self.backoffs_end_at, backoff.until)

    def delete(self, snapshots: list[Snapshot]) -> None:
        """Delete snapshots that the catalog dropped."""
        self.out.extend(Delete(snapshot) for snapshot in snapshots)

    def keep(
        self, snapshot: Snapshot, kind: MemoryKind, *, now: float = 0.0, keep: Keep = NO_KEEP
    ) -> None:
        """Offer a new snapshot to the catalog, and delete what the catalog drops for it.

        `keep`: from now on.
        """
        until = now + keep.seconds if keep.seconds else -inf
        worth = worth_of(self.inventory, snapshot)
        self.delete(
            self.inventory.catalog.add(snapshot, kind, *worth, until=until, owner=keep.owner)
        )

    def request_job(self, request: RequestId) -> RequestJob | None:
        """Return the job of a request. None: it has none, or has abandoned its slot."""
        job = self.inventory.jobs.get(request)
        return job if isinstance(job, RequestJob) else None

    def release_snapshot(self, job: RequestJob) -> None:
        """Release the job's reference to a snapshot, if it has one."""
        if job.using is not None:
            self.delete(self.inventory.catalog.drop_reference(job.using))
            job.use(None)

    def is_waited_for(self, backend: BackendId) -> bool:
        """Return whether a queued request could be served by a slot more of the backend."""
        there = self.inventory.up.get(backend)
        if there is None:
            return bool(self.queue)
        oldest = islice(self.queue, TUNING.checked_for_backend)
        return any(self.inventory.serves(there, waiting.request) for waiting in oldest)

    def waiting_for(self, server: Server) -> int:
        """Count the requests for a server's model that wait, read or unread."""
        servers = self.inventory.servers
        queued = sum(n for model, n, _ in self.queue.by_model() if server in servers.of(model))
        return queued + sum(server in servers.of(one.model) for one in servers.unread.values())

    @property
    def gives_up_content(self) -> bool:
        """Return True if the router is stopping and was told not to save."""
        return self.stopping and not self.saves_on_stop


def snapshot_lost(state: State, snapshot: SnapshotId) -> None:
    """Forget a snapshot that turned out to be unusable after it was committed."""
    state.inventory.catalog.forget(snapshot)


def snapshot_stored(state: State, snapshot: Snapshot) -> None:
    """Take a snapshot as it is now: it has blobs, or no whole file any more."""
    state.inventory.catalog.stored(snapshot)


def room_found(state: State, spare_bytes: int | None) -> None:
    """Note the bytes that the disk of the snapshots has to spare; None: nothing is known of it.

    Less than 0: so many are missing.
    """
    state.inventory.catalog.found_room(spare_bytes)


def purged(state: State, snapshots: Sequence[SnapshotId]) -> None:
    """Delete snapshots because an operator wants it; some may not exist any more."""
    for snapshot in snapshots:
        state.delete(state.inventory.catalog.remove(snapshot))
