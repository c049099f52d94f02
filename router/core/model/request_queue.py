"""Queue of requests that wait for a slot: fair between clients, limited in number and in time.

The client with the least server time comes first. Server time is the virtual token counter of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), in seconds. A client that
sends many or long prompts delays itself and not the others. Within a client, the oldest request
comes first. Background requests come after all others, and are fair among themselves.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf

from msgspec import Struct

from router.base.types import Request, RequestId
from router.core.model.tuning import TUNING


class QueueLimits(Struct, frozen=True):
    """Limits of the queue.

    `deadline_s`: longest wait; None: no limit. `no_backend_s`: longest wait while no backend that
    is up could serve the request.
    """

    max_requests: int = 1024
    deadline_s: float | None = 600.0
    no_backend_s: float = 10.0

    def deadline(self, since: float, waited_s: float = 0.0) -> float:
        """Return when a wait since then is too long, after `waited_s` of earlier waits.

        The only rule for `queue.deadline`: it counts waiting, and not computing. In clock seconds;
        inf: there is no limit.
        """
        return inf if self.deadline_s is None else since + self.deadline_s - waited_s


@dataclass(slots=True)
class Waiting:
    """A queued request, and its arrival in clock seconds."""

    request: Request
    since: float


@dataclass(slots=True)
class Queue:
    """Queued requests by arrival, client and model. Admission also depends on usable slots."""

    limits: QueueLimits = field(default_factory=QueueLimits)
    waiting: dict[RequestId, Waiting] = field(default_factory=dict)
    _clients: dict[str | None, dict[RequestId, Waiting]] = field(default_factory=dict)
    _models: dict[str | None, dict[RequestId, Waiting]] = field(default_factory=dict)
    _served_s: dict[str | None, float] = field(default_factory=dict)  # server time of each client
    _floor_s: float = 0.0  # server time that a new client starts with

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, request: RequestId) -> bool:
        return request in self.waiting

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self.waiting.values()))

    @property
    def models(self) -> Set[str | None]:
        """Return the models that queued requests ask for."""
        return self._models.keys()

    def in_turn(self) -> Iterator[Waiting]:
        """Yield all requests: one of each client, then a second of each, and so on.

        Background requests are yielded after all others, in the same way. A request that is removed
        meanwhile may still be yielded.
        """
        if len(self.waiting) <= 1:  # the usual case
            yield from self
            return
        clients = sorted(self._clients, key=self._served_s.__getitem__)
        waiting = [tuple(self._clients[client].values()) for client in clients]
        for background in (False, True):
            yield from self._around(waiting, background=background)

    @staticmethod
    def _around(waiting: list[tuple[Waiting, ...]], *, background: bool) -> Iterator[Waiting]:
        turns = [(w for w in own if w.request.background is background) for own in waiting]
        while turns:
            again = []
            for turn in turns:
                if (head := next(turn, None)) is not None:
                    again.append(turn)
                    yield head
            turns = again

    def oldest(self, n: int) -> list[Waiting]:
        """Return the `n` oldest requests of each model."""
        return [w for those in self._models.values() for w in islice(those.values(), n)]

    def by_model(self) -> Iterator[tuple[str | None, int, float]]:
        """Yield each model with its number of requests, and the arrival of the oldest."""
        for model, those in self._models.items():
            yield model, len(those), next(iter(those.values())).since

    def last(self) -> RequestId:
        """Return the newest request of the client with the most; a background one, if there is one.

        Raise ValueError if the queue is empty.
        """
        most = max(self._clients.values(), key=len)
        newest = [waiting.request for waiting in reversed(most.values())]
        return next((one for one in newest if one.background), newest[0]).id

    def add(self, request: Request, now: float) -> None:
        """Queue a request. A client gets no credit for time in which it had no request."""
        client = request.client
        waiting = self.waiting[request.id] = Waiting(request, now)
        self._know(client)
        self._clients.setdefault(client, {})[request.id] = waiting
        self._models.setdefault(request.model, {})[request.id] = waiting

    def _know(self, client: str | None) -> None:
        """Keep the server time of a client from now on."""
        if len(self._served_s) > TUNING.clients:
            self._floor_s = sorted(self._served_s.values())[TUNING.clients // 2]
            self._served_s = {
                one: seconds
                for one, seconds in self._served_s.items()
                if one in self._clients or seconds > self._floor_s
            }
        if client not in self._clients:
            self._served_s[client] = max(self._served_s.get(client, 0.0), self._floor_s)

    def serve(self, request: Request, seconds: float) -> None:
        """Charge the client of a request `seconds`, and remove the request if it is queued."""
        client = request.client
        # First: the floor is computed without these seconds.
        if self.remove(request.id) is None:  # it never waited
            self._know(client)
            self._floor_s = max(self._floor_s, self._served_s[client])
        self._served_s[client] += seconds

    def remove(self, request: RequestId) -> Waiting | None:
        """Remove a request and return it. None: it was not queued."""
        waiting = self.waiting.pop(request, None)
        if waiting is None:
            return None
        self._floor_s = max(self._floor_s, min(self._served_s[one] for one in self._clients))
        _drop(self._clients, waiting.request.client, request)
        _drop(self._models, waiting.request.model, request)
        return waiting

    def overdue(self, now: float) -> list[Waiting]:
        """Return the requests past their deadline: the first of the queue, if any."""
        late = self.limits.deadline
        return list(takewhile(lambda w: late(w.since) <= now, self.waiting.values()))

    def next_deadline(self) -> float:
        """Return the earliest deadline, in clock seconds. inf: there is none."""
        first = next(iter(self.waiting.values()), None)
        return inf if first is None else self.limits.deadline(first.since)


def _drop(
    groups: dict[str | None, dict[RequestId, Waiting]], name: str | None, request: RequestId
) -> None:
    del groups[name][request]
    if not groups[name]:
        del groups[name]
