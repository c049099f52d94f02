"""Prometheus metrics and the canonical log lines.

Every metric is described in `docs/metrics.md`. Labels come from enums and from the configuration,
never from a request.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from router.base.errors import RouterError
from router.base.types import (
    BackendId,
    Caller,
    Miss,
    Outcome,
    RequestId,
    RequestRecord,
    SlotId,
    Snapshot,
    Source,
    Transfer,
)
from router.telemetry.collected import Collected

log = structlog.get_logger("kvferry")

# Time to first token ranges from a restored short prompt to minutes of prefill on a CPU.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Requests are counted in batches: counted singly, between other work, each would find the caches
# cold and take 50 µs instead of 15 µs. The batch is small enough not to delay other work.
_COUNTED_AT_ONCE = 50
_TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PrometheusTelemetry:
    """`ports.Telemetry` that writes to a given registry.

    Counters with the label `backend` start at zero for `backends`.
    """

    def __init__(self, registry: CollectorRegistry, backends: Iterable[BackendId] = ()) -> None:
        self._uncounted: list[RequestRecord] = []
        # Registered first: collected first.
        registry.register(Collected(self._counted))
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, buckets=_TTFT_S, registry=registry)
        transfer = partial(Histogram, buckets=_TRANSFER_S, registry=registry)
        self._requests = counter("kvferry_requests", "Requests by outcome", ["outcome"])
        self._prompt_tokens = counter(
            "kvferry_prompt_tokens", "Prompt tokens as reported by backends, by source", ["source"]
        )
        self._generated_tokens = counter(
            "kvferry_generated_tokens", "Generated tokens as reported by backends"
        )
        self._sources = counter(
            "kvferry_plans", "Dispatched requests by planned source", ["source"]
        )
        self._missed = counter(
            "kvferry_missed_tokens",
            "Computed prompt tokens by the reason why they were not reused",
            ["reason"],
        )
        self._overestimated = counter(
            "kvferry_reuse_overestimated_tokens",
            "Tokens that a plan expected to be reused and that were not",
        )
        self._underestimated = counter(
            "kvferry_reuse_underestimated_tokens", "Tokens that were reused beyond the plan"
        )
        self._ttft = seconds(
            "kvferry_ttft_seconds", "Time from a request's arrival to its first byte", ["source"]
        )
        self._waited = seconds(
            "kvferry_queue_wait_seconds", "Time that a request waited in the router's queue"
        )
        self._prediction_error = seconds(
            "kvferry_ttft_prediction_error_seconds",
            "Absolute difference of predicted and measured time to the first byte",
        )
        self._predicted = counter(
            "kvferry_ttft_predicted_seconds",
            "Predicted time to the first byte, of the requests in kvferry_ttft_seconds",
            ["source"],
        )
        self._avoided = counter(
            "kvferry_prefill_avoided_seconds",
            "Prefill time that reuse saved, at the backend's learned rate",
            ["backend", "source"],
        )
        self._backend_requests = counter(
            "kvferry_backend_requests",
            "Requests that reached a backend, by outcome",
            ["backend", "outcome"],
        )
        self._misread = counter(
            "kvferry_prompts_misread",
            "Prompts of which the backend counted other tokens than kvferry read",
            ["backend"],
        )
        self._save = transfer("kvferry_save_seconds", "Backend time for a slot save", ["reason"])
        self._restore = transfer("kvferry_restore_seconds", "Backend time for a slot restore")
        self._moved = counter(
            "kvferry_moved_bytes",
            "Bytes of state files that backends wrote (save) and read (restore)",
            ["action"],
        )
        self._rewrite = transfer(
            "kvferry_rewrite_seconds", "Time to make a state file from another", ["what"]
        )
        self._rewritten = counter(
            "kvferry_rewritten_bytes", "Bytes of state files made from others", ["what"]
        )
        self._failures = counter(
            "kvferry_kv_failures",
            "Saves, restores, cuts, deletions and erases that failed",
            ["action"],
        )
        self._refused_keys = counter(
            "kvferry_refused_keys", "Requests with a missing or wrong key", ["reason"]
        )
        self._tenant_limits = counter(
            "kvferry_tenant_limits",
            "Requests refused because of a limit of their tenant",
            ["reason"],
        )
        for reason in ("missing", "wrong"):
            self._refused_keys.labels(reason)
        self._tenant_limits.labels("max_requests")
        # Labels are looked up once: a lookup for each request costs more than counting.
        sources = ("resident", "snapshot", "computed")
        self._tokens = {source: self._prompt_tokens.labels(source) for source in sources}
        self._missed_for = {reason: self._missed.labels(reason) for reason in Miss}
        self._outcome = {outcome: self._requests.labels(outcome) for outcome in Outcome}
        # Start each series at 0: `increase` of a series that begins at 1 is 0.
        for own in _own_outcomes():
            self._requests.labels(own)
        self._source = {source: self._sources.labels(source) for source in Source}
        self._predicted_of = {source: self._predicted.labels(source) for source in Source}
        self._ttft_of = {source: self._ttft.labels(source) for source in Source}
        self._requests_of = cache(self._backend_requests.labels)
        self._avoided_by = cache(self._avoided.labels)
        for backend in backends:
            self._misread.labels(backend)
            for outcome in Outcome:
                self._requests_of(backend, outcome)
            for source in (Source.RESIDENT, Source.SNAPSHOT, Source.COPY):
                self._avoided_by(backend, source)
        for action in ("save", "restore", "delete", "cut", "erase"):
            self._failures.labels(action)
        for what in ("assemble", "cut", "restream"):
            self._rewrite.labels(what)
            self._rewritten.labels(what)
        for action in ("save", "restore"):
            self._moved.labels(action)

    def request(self, record: RequestRecord) -> None:
        """Count and log a request that reached a backend."""
        self._uncounted.append(record)
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            self.count()
        log.info(
            "request",
            request_id=record.request,
            **_from(record.clients_id, record.caller),
            outcome=record.outcome,
            slot=str(record.slot),
            source=record.source,
            reason=record.reason,
            prompt_tokens=record.prompt_tokens,
            planned_tokens=record.planned_tokens,
            computed_tokens=record.computed_tokens,
            generated_tokens=record.generated_tokens,
            waited_s=_ms(record.waited_s),
            prepared_s=_ms(record.prepared_s),
            prefill_queue_s=_ms(record.prefill_queue_s),
            ttft_s=_ms(record.ttft_s),
            predicted_s=_ms(record.predicted_s),
            total_s=_ms(record.total_s),
        )

    def count(self) -> None:
        """Count the latest requests in the metrics. Runs before each scrape."""
        # Increment each counter once by its sum: `inc` costs ten times as much as an addition.
        sums: defaultdict[Counter, float] = defaultdict(float)
        for record in self._uncounted:
            self._count(record, sums)
        self._uncounted.clear()
        for counter, amount in sums.items():
            counter.inc(amount)

    def _counted(self) -> Iterable[Metric]:
        self.count()
        return ()

    def _count(self, record: RequestRecord, sums: defaultdict[Counter, float]) -> None:
        backend = record.slot.backend
        sums[self._outcome[record.outcome]] += 1
        sums[self._source[record.source]] += 1
        sums[self._requests_of(backend, record.outcome)] += 1
        if record.misread:
            sums[self._misread.labels(backend)] += 1
        self._waited.observe(record.waited_s)
        sums[self._generated_tokens] += record.generated_tokens or 0
        if record.ttft_s is not None:
            self._ttft_of[record.source].observe(record.ttft_s)
            sums[self._predicted_of[record.source]] += record.predicted_s
            self._prediction_error.observe(abs(record.predicted_s - record.ttft_s))
        if record.prompt_tokens is not None and record.computed_tokens is not None:
            reused = record.prompt_tokens - record.computed_tokens
            moved = record.source in (Source.SNAPSHOT, Source.COPY)
            sums[self._tokens["computed"]] += record.computed_tokens
            sums[self._tokens["snapshot" if moved else "resident"]] += reused
            if reused:
                by = record.source if moved else Source.RESIDENT
                sums[self._avoided_by(backend, by)] += record.avoided_s
            if record.source is not Source.NONE:
                sums[self._overestimated] += max(record.planned_tokens - reused, 0)
                sums[self._underestimated] += max(reused - record.planned_tokens, 0)
        for reason, tokens in record.missed.items():
            sums[self._missed_for[reason]] += tokens

    def rejected(
        self,
        request: RequestId,
        outcome: str,
        reason: str,
        clients_id: str | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Count and log a request that the router answered itself."""
        self._requests.labels(outcome).inc()
        named = _from(clients_id, caller)
        log.info("request", request_id=request, **named, outcome=outcome, reason=reason)

    def refused_key(self, reason: str) -> None:
        """Count a request with a missing or wrong key."""
        self._refused_keys.labels(reason).inc()

    def tenant_limited(self, reason: str) -> None:
        """Count a request refused because of a limit of its tenant."""
        self._tenant_limits.labels(reason).inc()

    def saved(self, slot: SlotId, reason: str, transfer: Transfer | None, problem: str) -> None:
        """Count and log a save that ended."""
        if transfer is None:
            self._failures.labels("save").inc()
            log.warning("save_failed", slot=str(slot), why=reason, reason=problem)
            return
        self._save.labels(reason).observe(transfer.seconds)
        self._moved.labels("save").inc(transfer.size_bytes)
        log.debug(
            "saved",
            slot=str(slot),
            why=reason,
            tokens=transfer.n_tokens,
            size_bytes=transfer.size_bytes,
            seconds=_ms(transfer.seconds),
        )

    def restored(self, slot: SlotId, transfer: Transfer | None, problem: str) -> None:
        """Count and log a restore that ended."""
        if transfer is None:
            self._failures.labels("restore").inc()
            log.warning("restore_failed", slot=str(slot), reason=problem)
            return
        self._restore.observe(transfer.seconds)
        self._moved.labels("restore").inc(transfer.size_bytes)
        log.debug(
            "restored",
            slot=str(slot),
            tokens=transfer.n_tokens,
            size_bytes=transfer.size_bytes,
            seconds=_ms(transfer.seconds),
        )

    def erase_failed(self, slot: SlotId, problem: str) -> None:
        """Count and log a slot that could not be emptied of another tenant's tokens."""
        self._failures.labels("erase").inc()
        log.warning("erase_failed", slot=str(slot), reason=problem)

    def rewritten(self, what: str, size_bytes: int, seconds: float, problem: str) -> None:
        """Count and log a state file made from another, or the failure to make it."""
        if problem:
            self._failures.labels(what).inc()
            log.warning("rewrite_failed", what=what, reason=problem)
            return
        self._rewrite.labels(what).observe(seconds)
        self._rewritten.labels(what).inc(size_bytes)
        log.debug("rewritten", what=what, size_bytes=size_bytes, seconds=_ms(seconds))

    def deleted(self, snapshot: Snapshot, problem: str) -> None:
        """Count and log a failed deletion of a snapshot; ignore a successful one."""
        if problem:
            self._failures.labels("delete").inc()
            log.warning("delete_failed", snapshot=snapshot.id, reason=problem)


def _own_outcomes() -> set[str]:
    """Return the outcomes of requests that the router answers itself."""
    kinds: list[type[RouterError]] = [RouterError]
    for kind in kinds:  # the loop extends the list
        kinds += kind.__subclasses__()
    return {kind.outcome for kind in kinds}


def _from(clients_id: str | None, caller: Caller | None) -> dict[str, str]:
    """Return the client's request id, key and tenant, as far as they are known."""
    named = {} if clients_id is None else {"client_request_id": clients_id}
    return named if caller is None else named | {"key": caller.key, "tenant": caller.tenant}


def _ms(seconds: float | None) -> float | None:
    """Round to milliseconds: more digits are noise in a log."""
    return None if seconds is None else round(seconds, 3)
