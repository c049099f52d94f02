"""Write backoff: write no state files for a backend for a while after failed writes.

A disk that is full or read-only stays so for minutes. Each attempt stops the server's streams for
nothing, and ends in a log line.
"""

from router.base.types import BackendId
from router.core.execution.state import State
from router.core.fleet.fleet import Backoff
from router.core.model.tuning import TUNING


def went_wrong(state: State, backend: BackendId, now: float) -> None:
    """Count a failed save or rewrite: the second in a row starts a backoff.

    Each further failure doubles the backoff.
    """
    if backend not in state.fleet.infos:
        return  # the backend went down, hence the failure
    rest = state.fleet.backoffs.setdefault(backend, Backoff())
    rest.failures += 1
    doubled = rest.failures - TUNING.write_failures_forgiven - 1
    if doubled >= 0:
        rest.until = now + min(
            TUNING.write_backoff_first_s * 2.0**doubled, TUNING.write_backoff_most_s
        )


def went_well(state: State, backend: BackendId) -> None:
    """Forget the failures of a backend after a successful save."""
    state.fleet.backoffs.pop(backend, None)


def end(state: State, now: float) -> None:
    """End the backoffs that are due, and reconsider all slots of their backends."""
    for backend, rest in state.fleet.backoffs.items():
        if rest.until is not None and rest.until <= now:
            rest.until = None
            for slot in state.fleet.slots.of(backend):
                slot.mark_saved(saved=False)


def next_end(state: State) -> float | None:
    """Return when the next backoff ends, in clock seconds."""
    ends = [rest.until for rest in state.fleet.backoffs.values() if rest.until is not None]
    return min(ends, default=None)
