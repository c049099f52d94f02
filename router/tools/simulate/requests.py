"""Requests of simulated clients, and the interface of a workload."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from router.base.tokens import Tokens
from router.base.types import Prompt, RequestId


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request as a client sends it, with the answer that it will get.

    `leaves_after_s`: the client disconnects this long after `at` if the answer is incomplete.
    """

    id: RequestId
    at: float  # seconds of simulated time
    prompt: Prompt
    answer: Tokens  # at least one token
    session: str | None = None
    leaves_after_s: float | None = None
    model: str | None = None  # None: any
    background: bool = False


class RequestSource(Protocol):
    """A workload. Open loop: `arrivals` yields all requests. Closed loop: `then` adds requests."""

    @property
    def total(self) -> int:
        """Return the number of requests, or an estimate if the workload cannot know it."""
        ...

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """Yield the requests that depend on no other, in the order of `at`; read one ahead."""
        ...

    def then(self, ask: SimulatedRequest, now: float, *, answered: bool) -> list[SimulatedRequest]:
        """Return the requests that follow the end of `ask`, none before `now`."""
        ...
