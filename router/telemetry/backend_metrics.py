"""Collect the backends' own metrics in one answer: each with its label, or summed up as one server.

A backend that is down, slow, without `--metrics` or sends malformed text is left out, and the
answer says so. Its failure never affects the metrics of other backends or of the router.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from time import monotonic

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from router.base.errors import BackendError
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.telemetry.collected import Collected

log = structlog.get_logger(__name__)

_UP = "kvferry_backend_scrape_up"
_LABEL, _THEIR_OWN = "backend", "exported_backend"  # the second as Prometheus does it
# llama-server's series (server-task.cpp): counters, and gauges that are summed; the largest counts
# of `_MOST`. Its two speeds and its busy slots are computed from the sums.
_SERVER = "llamacpp:"
_PROMPT, _ANSWER = (
    ("prompt_tokens", "prompt_seconds"),
    ("tokens_predicted", "tokens_predicted_seconds"),
)
_CALLS, _BUSY = "n_decode", "n_busy_slots_per_decode"
_COUNTERS = (
    *(*_PROMPT, "prompt_tokens_cached", *_ANSWER, _CALLS),
    *(f"spec_decode_num_{what}" for what in ("draft_tokens", "accepted_tokens", "drafts")),
)
_MOST = "n_tokens_max"
_SPEEDS = {"prompt_tokens_seconds": _PROMPT, "predicted_tokens_seconds": _ANSWER}
_NOW = ("requests_processing", "requests_deferred")
_WINDOW_S = 1.0
_WITHIN_S = 1.0  # chosen: a scrape may take some seconds


class BackendMetrics:
    """The backends' own metrics, fetched on demand. `registry` has the router's own."""

    def __init__(
        self, clients: Mapping[BackendId, LlamaClient], registry: CollectorRegistry
    ) -> None:
        self._clients = clients
        self._registry = registry
        self._problems: dict[BackendId, str] = {}
        self._last: dict[BackendId, dict[str, float]] = {}  # of each process, as it told last
        self._gone: defaultdict[str, float] = defaultdict(float)  # of processes that have ended
        self._window = (0.0, dict.fromkeys(_COUNTERS, 0.0))  # since when; the sums then
        self._speeds = dict.fromkeys(_SPEEDS, 0.0)
        self._of: dict[BackendId, LlamaClient] = {}  # who told it
        self._turn, self._looked_at = asyncio.Lock(), -_WINDOW_S

    async def sums(self, running: int, waiting: int) -> bytes:
        """Return the series of a llama-server, once for all of them, without a label.

        Monitors and dashboards for one llama-server read them. Counters go on when a process ends.
        `running` and `waiting`: requests, as kvferry counts them.
        """
        async with self._turn:  # one look a second for all scrapes: it disturbs a server at work
            if monotonic() - self._looked_at >= _WINDOW_S:
                await self._look()
                self._looked_at = monotonic()
        return generate_latest(Collected(lambda: self._summed(running, waiting)))

    async def _look(self) -> None:
        for client, found in await self._answers(set()):
            backend = client.id
            told, last = _values(found or ()), self._last.get(backend, {})
            fell = any(told.get(name, 0.0) < last.get(name, 0.0) for name in _COUNTERS)
            if last and told and (fell or self._of.get(backend) is not client):
                self._forget(backend)  # it is another process
            if told:
                self._last[backend], self._of[backend] = told, client
        for backend in [*self._last]:
            if backend not in self._clients:
                self._forget(backend)

    def _forget(self, backend: BackendId) -> None:
        last = self._last.pop(backend)
        for name in _COUNTERS:
            self._gone[name] += last.get(name, 0.0)
        self._gone[_BUSY] += last.get(_BUSY, 0.0) * last.get(_CALLS, 0.0)
        self._gone[_MOST] = max(self._gone[_MOST], last.get(_MOST, 0.0))

    def _summed(self, running: int, waiting: int) -> Iterator[Metric]:
        told = list(self._last.values())
        sums = {
            name: self._gone[name] + sum(one.get(name, 0.0) for one in told) for name in _COUNTERS
        }
        for name, value in sums.items():
            yield CounterMetricFamily(_SERVER + name, f"{name} of all servers", value)
        most = max([self._gone[_MOST], *(one.get(_MOST, 0.0) for one in told)])
        yield GaugeMetricFamily(_SERVER + _MOST, "the longest sequence of all servers", most)
        busy = self._gone[_BUSY] + sum(one.get(_BUSY, 0.0) * one.get(_CALLS, 0.0) for one in told)
        share = busy / sums[_CALLS] if sums[_CALLS] else 0.0
        yield GaugeMetricFamily(_SERVER + _BUSY, "busy slots of a call, on average", share)
        for name, value in self._speeds_of(sums).items():
            yield GaugeMetricFamily(_SERVER + name, "tokens per second since the last look", value)
        for name, count in zip(_NOW, (running, waiting), strict=True):
            yield GaugeMetricFamily(_SERVER + name, f"{name}, as kvferry counts", count)

    def _speeds_of(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the speeds since the last look, at least a second ago, as a server tells them."""
        since, before = self._window
        if (now := monotonic()) - since >= _WINDOW_S:
            for name, (tokens, seconds) in _SPEEDS.items():
                took_s = sums[seconds] - before[seconds]
                self._speeds[name] = (sums[tokens] - before[tokens]) / took_s if took_s > 0 else 0.0
            self._window = (now, dict(sums))
        return self._speeds

    async def text(self) -> bytes:
        """Return every backend's metrics, and for each backend whether it gave any.

        The text goes after the router's own metrics and shares no name with them.
        """
        families = await self._families()
        return generate_latest(Collected(lambda: families))

    async def _families(self) -> list[Metric]:
        taken = {_UP, *_names(self._registry.collect())}
        given = {client.id: found for client, found in await self._answers(taken)}
        up = GaugeMetricFamily(_UP, "1 if the backend gave its metrics", labels=[_LABEL])
        for backend, found in given.items():
            up.add_metric([backend], float(found is not None))
        return [up, *merge({backend: found for backend, found in given.items() if found})]

    async def _answers(self, taken: set[str]) -> list[tuple[LlamaClient, list[Metric] | None]]:
        """Ask all backends at once, those that are there now."""
        clients = list(self._clients.values())
        found = await asyncio.gather(*(self._ask(client, taken) for client in clients))
        return list(zip(clients, found, strict=True))

    async def _ask(self, client: LlamaClient, taken: set[str]) -> list[Metric] | None:
        try:
            async with asyncio.timeout(_WITHIN_S):  # it answers between two batches
                text = await client.metrics()
            found = await asyncio.to_thread(parse, text)
            if not taken.isdisjoint(_names(found)):
                raise ValueError("it has a metric with the name of a router metric")
        except (BackendError, ValueError, TimeoutError) as error:
            self._note(client.id, str(error) or "it did not answer in time")
            return None
        self._problems.pop(client.id, None)
        return found

    def _note(self, backend: BackendId, problem: str) -> None:
        """Log a problem when it changes, not with every scrape."""
        if self._problems.get(backend) != problem:
            self._problems[backend] = problem
            log.info("backend_metrics_skipped", backend=backend, reason=problem)


def _values(families: Iterable[Metric]) -> dict[str, float]:
    """Return the values of a server by the names of its families, without labels and prefix."""
    return {
        family.name.removeprefix(_SERVER): sample.value
        for family in families
        for sample in family.samples
        if not sample.labels and isfinite(sample.value)
    }


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
