"""Collect the backends' own metrics in one answer: asked at once, labelled, merged by family.

A backend that is down, slow, without `--metrics` or sends malformed text is left out, and the
answer says so. Its failure never affects the metrics of other backends or of the router.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from router.base.errors import BackendError
from router.base.types import BackendId
from router.llama.client import LlamaClient

log = structlog.get_logger(__name__)

_UP = "kvferry_backend_scrape_up"
_LABEL, _THEIR_OWN = "backend", "exported_backend"  # the second as Prometheus does it


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    """A collector of families that are collected already."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


class BackendMetrics:
    """The backends' own metrics, fetched on demand. `registry` has the router's own."""

    def __init__(
        self, clients: Mapping[BackendId, LlamaClient], registry: CollectorRegistry
    ) -> None:
        self._clients = clients
        self._registry = registry
        self._problems: dict[BackendId, str] = {}

    async def text(self) -> bytes:
        """Return every backend's metrics, and for each backend whether it gave any.

        The text goes after the router's own metrics and shares no name with them.
        """
        return generate_latest(_Families(await self._families()))

    async def _families(self) -> list[Metric]:
        taken = {_UP, *_names(self._registry.collect())}
        clients = dict(self._clients)  # a copy: the clients may change meanwhile
        answers = await asyncio.gather(*(self._ask(client, taken) for client in clients.values()))
        given = dict(zip(clients, answers, strict=True))
        up = GaugeMetricFamily(_UP, "1 if the backend gave its metrics", labels=[_LABEL])
        for backend, found in given.items():
            up.add_metric([backend], float(found is not None))
        return [up, *merge({backend: found for backend, found in given.items() if found})]

    async def _ask(self, client: LlamaClient, taken: set[str]) -> list[Metric] | None:
        try:
            text = await client.metrics()
            found = await asyncio.to_thread(parse, text)
            if not taken.isdisjoint(_names(found)):
                raise ValueError("it has a metric with the name of a router metric")
        except (BackendError, ValueError) as error:
            self._note(client.id, str(error))
            return None
        self._problems.pop(client.id, None)
        return found

    def _note(self, backend: BackendId, problem: str) -> None:
        """Log a problem when it changes, not with every scrape."""
        if self._problems.get(backend) != problem:
            self._problems[backend] = problem
            log.info("backend_metrics_skipped", backend=backend, reason=problem)


def _names(families: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of families and samples: none may occur twice."""
    for family in families:
        yield family.name
        yield from (sample.name for sample in family.samples)


def parse(text: bytes) -> list[Metric]:
    """Return the families of a text in Prometheus' format. Raises ValueError."""
    try:
        decoded = text.decode()
        families = list(text_string_to_metric_families(decoded))
    # The parser's message quotes the text; some texts raise IndexError.
    except (ValueError, IndexError) as error:
        raise ValueError("not in Prometheus' text format") from error
    if not families:
        raise ValueError("no metrics in it")
    return [_named_as_given(family, decoded) for family in families]


def _named_as_given(family: Metric, text: str) -> Metric:
    """Return the family with the name that llama-server gave it.

    llama-server has a counter without `_total` at the end of its name (`n_tokens_max`). The parser
    adds `_total`, but the router must not rename a backend's metric.
    """
    if family.type != "counter" or f"{family.name}_total" in text:
        return family
    same = Metric(family.name, family.documentation, "untyped")
    for sample in family.samples:
        same.add_sample(family.name, sample.labels, sample.value, sample.timestamp)
    return same


def merge(given: Mapping[BackendId, Iterable[Metric]]) -> list[Metric]:
    """Merge to one family for each name; label every sample with its `backend`.

    Where two servers differ about the type of a family, the first server's type holds and the
    samples of the other are left out.
    """
    merged: dict[str, Metric] = {}
    for backend, families in given.items():
        for family in families:
            whole = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            if whole.type != family.type:
                continue
            for name, labels, value, timestamp, *_ in family.samples:
                theirs = {_THEIR_OWN if key == _LABEL else key: labels[key] for key in labels}
                whole.add_sample(name, theirs | {_LABEL: backend}, value, timestamp)
    return list(merged.values())
