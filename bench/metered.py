"""`python -m bench.metered FILE serve ...`: kvferry, with the CPU time of page and metrics counted.

At its end the process writes JSON to FILE, all in CPU seconds. `page_s` and `metrics_s`: the event
loop's thread in the code that keeps and sends the live page and the metrics. `total_s`: the whole
process, from the first such moment to the last.
"""

import atexit
import json
import sys
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from pathlib import Path
from time import process_time, thread_time
from types import coroutine
from typing import Any

from router.telemetry.metrics import PrometheusTelemetry
from router.tools.cli import main
from router.web.admin.live import Live
from router.web.admin.status import StatusRoutes


class Meter:
    """Sums of the CPU time of some functions, and of the steps of some coroutines."""

    def __init__(self) -> None:
        self.seconds = {"page_s": 0.0, "metrics_s": 0.0}
        self._first: float | None = None
        self._last = 0.0

    def report(self) -> dict[str, float]:
        """Return the sums for JSON."""
        total_s = self._last - self._first if self._first is not None else 0.0
        return self.seconds | {"total_s": total_s}

    def function(self, name: str, owner: type, method: str) -> None:
        """Count the time of a method from now on."""
        function = getattr(owner, method)
        setattr(owner, method, wraps(function)(lambda *args: self._timed(name, function, *args)))

    def coroutine(self, name: str, owner: type, method: str) -> None:
        """Count the steps of a coroutine method from now on, without the time that it waits."""
        function = getattr(owner, method)

        @wraps(function)
        async def counted(*args: Any) -> Any:
            return await _in_steps(function(*args), lambda *step: self._timed(name, *step))

        setattr(owner, method, counted)

    def _timed(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if self._first is None:
            self._first = process_time()
        start = thread_time()
        try:
            return function(*args)
        finally:
            self.seconds[name] += thread_time() - start
            self._last = process_time()


@coroutine
def _in_steps(work: Coroutine[Any, Any, Any], call: Callable[..., Any]) -> Generator[Any, Any, Any]:
    step: Callable[..., Any] = work.send
    value: Any = None
    while True:
        try:
            waits_for = call(step, value)
        except StopIteration as over:
            return over.value
        try:
            value, step = (yield waits_for), work.send
        except BaseException as error:  # noqa: BLE001 - any error is passed on
            value, step = error, work.throw


def _run(argv: list[str]) -> int:
    meter, file = Meter(), Path(argv[0])
    meter.coroutine("page_s", Live, "events")
    meter.coroutine("page_s", Live, "keep_refreshing")
    meter.coroutine("metrics_s", StatusRoutes, "metrics")
    meter.function("metrics_s", PrometheusTelemetry, "count")
    atexit.register(lambda: file.write_text(json.dumps(meter.report())))
    return main(argv[1:])


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
