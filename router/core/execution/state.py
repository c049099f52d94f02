"""What the scheduler owns, and the few things that every part of it does to it."""

from dataclasses import dataclass, field

from router.base.errors import RouterError
from router.base.types import (
    BackendId,
    MemoryKind,
    Request,
    RequestId,
    Snapshot,
    SnapshotId,
    Stall,
)
from router.core.fleet.fleet import Fleet
from router.core.model.effects import Delete, Effect, Reject
from router.core.model.jobs import Job, RestoreStep, Stage
from router.core.model.request_queue import Queue
from router.core.model.slots import UNKNOWN, Slot
from router.core.planning.snapshot_value import worth_of


@dataclass(slots=True)
class State:
    """Fleet, queue and jobs; `out` collects the effects of the event in hand."""

    fleet: Fleet = field(default_factory=Fleet)
    queue: Queue = field(default_factory=Queue)
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    unexplained: list[Job] = field(default_factory=list)  # granted by the last event
    # Restores that are under way although their job has ended: they keep their reference.
    late: dict[RequestId, SnapshotId] = field(default_factory=dict)
    strikes: dict[SnapshotId, int] = field(default_factory=dict)
    in_line: list[RequestId] = field(default_factory=list)  # see core/turns.py
    at_gate: list[RequestId] = field(default_factory=list)  # see core/gate.py
    looked_at: set[RequestId] = field(default_factory=set)  # of those who wait, in this round
    changed: bool = False  # something has, since the first of them was
    look_on_at: float | None = None  # when the next of them are looked at, in clock seconds
    unserved: dict[str | None, float] = field(default_factory=dict)  # see grants.note_unserved
    stopping: bool = False
    saves_on_stop: bool = True
    saves: int = 0  # in the background, so far; makes their ids
    out: list[Effect] = field(default_factory=list)
    # Seconds x streams, so far.
    stalled_s: dict[BackendId, dict[Stall, float]] = field(default_factory=dict)

    def stalled(self, backend: BackendId, stall: Stall, seconds: float) -> None:
        """Something took `seconds` in which the backend's running streams got no further."""
        total_s = self.stalled_s.setdefault(backend, {})
        total_s[stall] = total_s.get(stall, 0.0) + seconds * self.fleet.running(backend)

    def reject(self, request: RequestId, error: RouterError) -> None:
        """Tell the client no."""
        self.out.append(Reject(request, error))

    def delete(self, snapshots: list[Snapshot]) -> None:
        """Delete what the catalog gave up."""
        self.out.extend(Delete(snapshot) for snapshot in snapshots)

    def keep(self, snapshot: Snapshot, kind: MemoryKind) -> None:
        """There is a snapshot: offer it to the catalog."""
        self.delete(self.fleet.catalog.add(snapshot, kind, *worth_of(self.fleet, snapshot)))

    def holder(self, slot: Slot) -> Job | None:
        """The job that has a slot."""
        return None if slot.holder is None else self.jobs.get(slot.holder)

    def is_served(self, request: Request) -> bool:
        """Some backend that is up could serve the request, busy or not."""
        return any(self.fleet.serves(backend, request) for backend in self.fleet.infos)

    def let_go(self, job: Job) -> None:
        """Give back the job's reference to a snapshot, now or when the restore is over.

        A job can end with its backend; the file may still be read.
        """
        if job.using is None:
            return
        if job.stage is Stage.PREPARING and isinstance(job.doing, RestoreStep):
            self.late[job.id] = job.using
        else:
            self.delete(self.fleet.catalog.release(job.using))
        job.using = None

    def restore_over(self, request: RequestId) -> None:
        """Nobody reads the file any more that was restored for the request."""
        job = self.jobs.get(request)
        used = self.late.pop(request, None) if job is None else job.using
        if used is not None:
            self.delete(self.fleet.catalog.release(used))
        if job is not None:
            job.using = None

    @property
    def gives_up_content(self) -> bool:
        """The router is stopping, and was told not to save."""
        return self.stopping and not self.saves_on_stop

    def others_cleared(self, backend: BackendId) -> None:
        """A request is sent. Where its start empties idle slots, nothing is claimed of them
        (llama-server.md section 0.6). Nor that they are empty: the client may leave before it
        starts.
        """
        for slot in self.fleeting(backend):
            self.fleet.give_up(slot)
            slot.resident = UNKNOWN

    def fleeting(self, backend: BackendId) -> list[Slot]:
        """The idle slots whose content is gone when a request starts. After one was sent, those
        that came free since: emptied, if it started later."""
        info = self.fleet.infos.get(backend)
        if info is None or info.keeps_idle_slots:
            return []
        return [s for s in self.fleet.slots.of(backend) if s.is_idle and len(s.resident) > 0]
