"""Requests that wait for a slot: fair between clients, limited in number and in time.

Between clients: who has had the least server time comes first. That is the virtual token counter
of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), in seconds. A client that
sends many or long prompts waits for itself and not before everybody else. Of one client, the
oldest comes first.
"""

from collections.abc import Iterator, Set
from dataclasses import field
from itertools import islice

from router.base.frozen import dataclass
from router.base.types import Request, RequestId

_CLIENTS = 10_000  # remembered; of one more, the half that has had the least is forgotten


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`deadline_s` None: wait for ever. `no_backend_s`: how long while nobody could serve it."""

    max_requests: int = 1024
    deadline_s: float | None = 600.0
    no_backend_s: float = 10.0


@dataclass(slots=True)
class Waiting:
    """A request and when it came, in clock seconds; how often others went before it."""

    request: Request
    since: float
    passed_over: int = 0


@dataclass(slots=True)
class Queue:
    """Who waits, by arrival and by client. Who is served depends on what each can use as well."""

    limits: QueueLimits = field(default_factory=QueueLimits)
    _waiting: dict[RequestId, Waiting] = field(default_factory=dict)
    _clients: dict[str | None, dict[RequestId, Waiting]] = field(default_factory=dict)
    _models: dict[str | None, dict[RequestId, Waiting]] = field(default_factory=dict)
    _served_s: dict[str | None, float] = field(default_factory=dict)  # what each has had
    _floor_s: float = 0.0  # a newcomer counts as having had this much

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._waiting.values()))

    @property
    def models(self) -> Set[str | None]:
        """What they wait for."""
        return self._models.keys()

    def in_turn(self) -> Iterator[Waiting]:
        """All of them: one of each client, then a second of each, and so on. Who leaves meanwhile
        may still come."""
        if len(self._waiting) <= 1:  # as a rule
            yield from self
            return
        clients = sorted(self._clients, key=self._served_s.__getitem__)
        turns = [iter(tuple(self._clients[client].values())) for client in clients]
        while turns:
            again = []
            for turn in turns:
                if (head := next(turn, None)) is not None:
                    again.append(turn)
                    yield head
            turns = again

    def oldest(self, n: int) -> list[Waiting]:
        """The first `n` who came, of each model."""
        return [w for those in self._models.values() for w in islice(those.values(), n)]

    def last(self) -> RequestId:
        """The youngest of the client that has the most. Raises ValueError if nobody waits."""
        most = max(self._clients, key=lambda client: len(self._clients[client]))
        return next(reversed(self._clients[most]))

    def add(self, request: Request, now: float) -> None:
        """Wait. Who asked for nothing for a while has no claim on that time."""
        client = request.client
        waiting = self._waiting[request.id] = Waiting(request, now)
        if len(self._served_s) > _CLIENTS:
            self._floor_s = sorted(self._served_s.values())[_CLIENTS // 2]
            self._served_s = {
                one: seconds
                for one, seconds in self._served_s.items()
                if one in self._clients or seconds > self._floor_s
            }
        if client not in self._clients:
            self._clients[client] = {}
            self._served_s[client] = max(self._served_s.get(client, 0.0), self._floor_s)
        self._clients[client][request.id] = waiting
        self._models.setdefault(request.model, {})[request.id] = waiting

    def serve(self, request: RequestId, seconds: float) -> None:
        """Wait no longer: it gets so much of a server's time. Raises KeyError: it did not wait."""
        client = self._waiting[request].request.client
        self.remove(request)  # first: what is now under way is not yet had by everybody
        self._served_s[client] += seconds

    def lead_s(self, one: Waiting, other: Waiting) -> float:
        """How much more server time the client of one has had than the other's."""
        return self._served_s[one.request.client] - self._served_s[other.request.client]

    def remove(self, request: RequestId) -> Waiting | None:
        """Wait no longer. None: it did not wait."""
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return None
        self._floor_s = max(self._floor_s, min(self._served_s[one] for one in self._clients))
        _drop(self._clients, waiting.request.client, request)
        _drop(self._models, waiting.request.model, request)
        return waiting

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


def _drop(
    groups: dict[str | None, dict[RequestId, Waiting]], name: str | None, request: RequestId
) -> None:
    del groups[name][request]
    if not groups[name]:
        del groups[name]
