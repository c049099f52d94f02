"""The prefill queue and the placement gate of one backend: the holder, and the waiting jobs.

`execution/prefill_queue.py` and `execution/placement_gate.py` have the rules.
"""

from dataclasses import dataclass, field

from router.base.types import RequestId


@dataclass(slots=True)
class PrefillQueue:
    """The prefill queue of one backend. The permit ends by itself, in clock seconds."""

    holder: RequestId | None = None
    permit_until: float = 0.0
    waiting: list[RequestId] = field(default_factory=list)

    def has_permit(self, job: RequestId, now: float) -> bool:
        """Return whether a job has the permit."""
        return self.holder == job and now < self.permit_until

    def grant(self, job: RequestId, until: float) -> None:
        """Give the permit to a job until then; the job waits no longer."""
        if job in self.waiting:
            self.waiting.remove(job)
        self.holder, self.permit_until = job, until

    def end_permit(self, job: RequestId, at: float = 0.0) -> None:
        """End the permit then, or now, if the job has it."""
        if self.holder == job:
            self.permit_until = min(self.permit_until, at)

    def wait(self, job: RequestId) -> None:
        """Let a job wait; its permit ends."""
        self.end_permit(job)
        self.waiting.append(job)

    def leave(self, job: RequestId) -> None:
        """End the job's permit, if it has one; let the job wait no longer."""
        self.end_permit(job)
        if job in self.waiting:
            self.waiting.remove(job)


@dataclass(slots=True)
class PlacementGate:
    """The placement gate of one backend: closed while a job holds it."""

    holder: RequestId | None = None
    waiting: list[RequestId] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        return self.holder is not None

    def take(self, job: RequestId) -> None:
        """Close the gate behind a job, which no longer waits."""
        self.leave(job)
        self.holder = job

    def wait(self, job: RequestId) -> None:
        """Let a job wait."""
        self.waiting.append(job)

    def leave(self, job: RequestId) -> None:
        """Open the gate if the job holds it; let the job wait no longer."""
        if self.holder == job:
            self.holder = None
        if job in self.waiting:
            self.waiting.remove(job)
