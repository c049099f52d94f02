"""What the scheduler owns, and the few things that every part of it does to it."""

from dataclasses import dataclass, field

from router.core.cost import Rates
from router.core.effects import Delete, Effect, Reject
from router.core.jobs import Job
from router.core.planner import Fleet
from router.core.queue import Queue
from router.errors import RouterError
from router.types import Request, RequestId, Snapshot, SnapshotId


@dataclass(slots=True)
class State:
    """Fleet, queue and jobs; `out` collects the effects of the event in hand."""

    fleet: Fleet = field(default_factory=Fleet)
    queue: Queue = field(default_factory=Queue)
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    strikes: dict[SnapshotId, int] = field(default_factory=dict)
    stopping: bool = False
    saves_on_stop: bool = True
    saves: int = 0  # in the background, so far; makes their ids
    out: list[Effect] = field(default_factory=list)

    def reject(self, request: RequestId, error: RouterError) -> None:
        """Tell the client no."""
        self.out.append(Reject(request, error))

    def delete(self, snapshots: list[Snapshot]) -> None:
        """Delete what the catalog gave up."""
        self.out.extend(Delete(snapshot) for snapshot in snapshots)

    def is_served(self, request: Request) -> bool:
        """Some backend that is up could serve the request, busy or not."""
        return any(self.fleet.serves(backend, request) for backend in self.fleet.infos)

    def let_go(self, job: Job) -> None:
        """Give back the job's reference to a snapshot."""
        if job.using is not None:
            self.delete(self.fleet.catalog.release(job.using))
            job.using = None

    def value_s(self, snapshot: Snapshot) -> float:
        """Seconds that computing a snapshot again would take, on the slowest backend it fits."""
        times = [
            self.fleet.rates[info.id].prefill_s(len(snapshot))
            for info in self.fleet.infos.values()
            if info.namespace == snapshot.namespace
        ]
        return max(times, default=Rates().prefill_s(len(snapshot)))
