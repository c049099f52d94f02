"""A collector made of a function that yields metrics at each scrape."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Collector):
    """What `function` yields at each scrape, so that no gauge can drift."""

    function: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        return self.function()
