"""Terminal output of the tools.

Results go to standard output, progress to standard error, and log lines of the router's parts are
dropped.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import structlog
from rich.console import Console
from rich.status import Status
from rich.text import Text


def output() -> Console:
    """Return a console on standard output: plain text when piped, then 80 columns or `COLUMNS`."""
    return Console(highlight=False, soft_wrap=False, markup=False, emoji=False)


class Progress(AbstractContextManager["Progress"]):
    """Progress on standard error: a spinner on a terminal, else one line for each step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None

    def __call__(self, text: str) -> None:
        """Show `text` as the current step."""
        if not self._console.is_terminal:
            self._console.print(Text(text), soft_wrap=True)
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def stop(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def no_log_lines() -> Iterator[None]:
    """Silence structlog below "critical" inside the block; restore its settings afterwards."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        cache_logger_on_first_use=False,  # a cached logger would stay silent afterwards
    )
    try:
        yield
    finally:
        structlog.configure(**before)
