"""Backends for which nothing is written for a while, because writing went wrong.

A disk that is full or read-only stays so for minutes. Each attempt stops the server's streams for
nothing, and ends in a log line.
"""

from router.base.types import BackendId
from router.core.execution.state import State
from router.core.fleet.fleet import Rest

# A state that can never be saved (media that has no file form) says nothing about the next one.
_FORGIVEN = 1  # in a row
_FIRST_S, _MOST_S = 1.0, 60.0


def went_wrong(state: State, backend: BackendId, now: float) -> None:
    """A save or a rewriting failed: the second time in a row writing rests, then twice as long."""
    if backend not in state.fleet.infos:
        return  # it failed because the backend went away
    rest = state.fleet.rests.setdefault(backend, Rest())
    rest.failures += 1
    doubled = rest.failures - _FORGIVEN - 1
    if doubled >= 0:
        rest.until = now + min(_FIRST_S * 2.0**doubled, _MOST_S)


def went_well(state: State, backend: BackendId) -> None:
    """A save was good."""
    state.fleet.rests.pop(backend, None)


def end(state: State, now: float) -> None:
    """Try again where it is time, with all that was passed over."""
    for backend, rest in state.fleet.rests.items():
        if rest.until is not None and rest.until <= now:
            rest.until = None
            for slot in state.fleet.slots.of(backend):
                slot.saved = False


def next_end(state: State) -> float | None:
    """When the next rest ends, in clock seconds."""
    ends = [rest.until for rest in state.fleet.rests.values() if rest.until is not None]
    return min(ends, default=None)
