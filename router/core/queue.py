"""Requests that wait for a slot: in order of arrival, limited in number and in time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from router.types import Request, RequestId


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`deadline_s` None: wait for ever. `no_backend_s`: how long while nobody could serve it."""

    max_requests: int = 1024
    deadline_s: float | None = 600.0
    no_backend_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request and when it came, in clock seconds."""

    request: Request
    since: float


@dataclass(slots=True)
class Queue:
    """First come, first looked at; who is served depends on what each can use."""

    limits: QueueLimits = field(default_factory=QueueLimits)
    _waiting: dict[RequestId, Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._waiting.values()))

    def oldest(self, n: int) -> list[Waiting]:
        """The first `n` of them."""
        return list(islice(self._waiting.values(), n))

    def youngest(self) -> RequestId:
        """The last to come. Raises StopIteration if nobody waits."""
        return next(reversed(self._waiting))

    def add(self, request: Request, now: float) -> None:
        """Wait."""
        self._waiting[request.id] = Waiting(request, now)

    def remove(self, request: RequestId) -> Waiting | None:
        """Wait no longer. None: it did not wait."""
        return self._waiting.pop(request, None)

    def overdue(self, now: float) -> list[Waiting]:
        """Those past their deadline."""
        limit = self.limits.deadline_s
        if limit is None:
            return []
        return [w for w in self._waiting.values() if now - w.since >= limit]

    def next_deadline(self) -> float | None:
        """When the first of them is overdue, in clock seconds."""
        if self.limits.deadline_s is None or not self._waiting:
            return None
        return next(iter(self._waiting.values())).since + self.limits.deadline_s
