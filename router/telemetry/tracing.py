"""Traces of requests through the OpenTelemetry SDK; imported only where `tracing.endpoint` is set.

One span for each request of a client that takes a slot, its parent the client's `traceparent`, and
below it where the time went. Attributes are those of the semantic conventions for GenAI where they
fit, and `kvferry.*`. Never a prompt, an answer or a key.
"""

import asyncio
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router import __version__
from router.base.ports import Attempt
from router.base.types import Outcome, RequestId
from router.llama.http1 import Header

_W3C = TraceContextTextMapPropagator()
_CONTEXT = ("traceparent", "tracestate")
# The routes that make text of a prompt, by their last word; all others say what they do.
_OPERATIONS = {
    "completion": "text_completion",
    "completions": "text_completion",
    "infill": "text_completion",
    "messages": "chat",
    "responses": "chat",
    "embedding": "embeddings",
}


class Tracing:
    """ports.Tracing. `aclose` sends what is left."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry", __version__)

    def begin(
        self, path: str, headers: Mapping[str, str], request: RequestId, model: str | None, ns: int
    ) -> "RequestTrace":
        """A client's request to `path`, which came at `ns` nanoseconds since the epoch."""
        given = {name: headers[name] for name in _CONTEXT if name in headers}
        operation = _operation(path)
        span = self._tracer.start_span(
            operation if model is None else f"{operation} {model}",
            _W3C.extract(given),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "kvferry.request_id": request},
            start_time=ns,
        )
        if model is not None:
            span.set_attribute("gen_ai.request.model", model)
        return RequestTrace(self._tracer, span, ns)

    async def aclose(self) -> None:
        """Send what is left, within the exporter's own limits of time."""
        await asyncio.to_thread(self._provider.shutdown)


def exporting(endpoint: str) -> Tracing:
    """Spans go to an OTLP/HTTP collector, many at a time, from a thread of the SDK's own."""
    provider = TracerProvider(resource=Resource.create({"service.name": "kvferry"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


def _operation(path: str) -> str:
    if path.rstrip("/").endswith("/chat/completions"):
        return "chat"
    last = path.rstrip("/").rpartition("/")[2]
    return _OPERATIONS.get(last, last)


class RequestTrace:
    """ports.Trace."""

    def __init__(self, tracer: trace.Tracer, span: Span, ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._ns = ns
        self._context = trace.set_span_in_context(span)

    def inject(self, headers: Sequence[Header]) -> list[Header]:
        """These headers, with this request as the parent of what the backend does."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        kept = [header for header in headers if header[0].lower().decode("latin-1") not in _CONTEXT]
        return kept + [(name.encode(), value.encode()) for name, value in carrier.items()]

    def attempt(self, told: Attempt) -> None:
        """It was with a backend: where the time went, and what the backend reported."""
        granted_s = told.granted_s
        self._child("queue wait", told.asked_s, told.asked_s + told.waited_s)
        self._child("prepare", told.asked_s + told.waited_s, granted_s)
        first_s = told.ended_s if told.first_byte_s is None else told.first_byte_s
        self._child("first byte", granted_s, first_s)
        if told.first_byte_s is not None:
            self._child("stream", told.first_byte_s, told.ended_s)
        reported = told.reported
        found: dict[str, str | int | None] = {
            "kvferry.backend": told.slot.backend,
            "kvferry.slot": told.slot.index,
            "kvferry.source": told.source,
            "kvferry.planned_tokens": told.planned_tokens,
            "kvferry.outcome": told.outcome,
            "gen_ai.usage.input_tokens": reported.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": reported.cached_tokens,
            "gen_ai.usage.output_tokens": reported.generated_tokens,
        }
        self._span.set_attributes({k: v for k, v in found.items() if v is not None})
        if told.outcome is Outcome.BACKEND_ERROR:
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self, ended_s: float, error: str | None) -> None:
        """Over, so many seconds after it came; `error`: what kind of answer the router gave."""
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._at(ended_s))

    def _child(self, name: str, start_s: float, end_s: float) -> None:
        span = self._tracer.start_span(name, self._context, start_time=self._at(start_s))
        span.end(self._at(max(end_s, start_s)))

    def _at(self, seconds: float) -> int:
        return self._ns + round(seconds * 1e9)
