"""Drivers of server processes: each process has one, on this host or on another.

Two drivers of one server would send requests to each other's slots, which destroys answers
(llama-server.md section 0.1).
"""

from collections.abc import Callable

from router.base.types import BackendId
from router.llama.replies import Process


class Drivers:
    """The server processes that backends here drive, and those that are left to other hosts."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Start without drivers. `now`: clock seconds."""
        self._now = now
        self._holders: dict[Process, tuple[BackendId, float]] = {}
        self._elsewhere: dict[Process, tuple[BackendId, float]] = {}

    def take(self, process: Process, backend: BackendId) -> BackendId:
        """Make a backend the driver of a process that has none; return the driver."""
        if process in self._elsewhere:
            return self._elsewhere[process][0]
        return self._holders.setdefault(process, (backend, self._now()))[0]

    def release(self, backend: BackendId) -> None:
        """Release the processes that a backend drives."""
        for process, (holder, _) in list(self._holders.items()):
            if holder == backend:
                del self._holders[process]

    def held_s(self) -> dict[Process, float]:
        """Return the seconds for which each process has a driver here."""
        now = self._now()
        return {process: now - since for process, (_, since) in self._holders.items()}

    def left_s(self) -> dict[Process, float]:
        """Return the seconds since the last `leave` of each process that another host drives."""
        now = self._now()
        return {process: now - since for process, (_, since) in self._elsewhere.items()}

    def leave(self, process: Process, driver: BackendId) -> None:
        """Leave a process to a driver on another host: its monitor here is told so."""
        self._holders.pop(process, None)
        self._elsewhere[process] = driver, self._now()

    def take_back(self, process: Process) -> None:
        """End `leave`: the next monitor that sees the process may take it."""
        self._elsewhere.pop(process, None)
