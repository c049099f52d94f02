"""What clients send in a simulation, and how a workload reacts to what becomes of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from router.base.tokens import Tokens
from router.base.types import Prompt, RequestId


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as a client sends it, with the answer that it will get.

    `leaves_after_s`: the client closes the connection so long after `at` unless it has the whole
    answer by then.
    """

    id: RequestId
    at: float  # seconds of simulated time
    prompt: Prompt
    answer: Tokens  # at least one token
    session: str | None = None
    leaves_after_s: float | None = None


class Source(Protocol):
    """A workload. Open loop: all of it is in `arrivals`. Closed loop: `then` says what follows."""

    @property
    def total(self) -> int:
        """How many requests there will be; an estimate where the workload cannot know."""
        ...

    def arrivals(self) -> Iterator[Ask]:
        """What comes by itself, in the order of `at`. Read one ahead, never all at once."""
        ...

    def then(self, ask: Ask, now: float, *, answered: bool) -> list[Ask]:
        """What clients send because `ask` is over; none of it before `now`."""
        ...
