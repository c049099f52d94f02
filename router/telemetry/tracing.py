"""Trace requests with the OpenTelemetry SDK; imported only where `tracing.endpoint` is set.

Each client request that takes a slot has one span; its parent is the client's `traceparent`. Child
spans show where the time went. Attributes are those of the semantic conventions for GenAI where
they fit, and `kvferry.*`. No span has a prompt, an answer or a key.
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
# Operation names by the last word of the route; for other routes, that word is the name.
_OPERATIONS = {
    "completion": "text_completion",
    "completions": "text_completion",
    "infill": "text_completion",
    "messages": "chat",
    "responses": "chat",
    "embedding": "embeddings",
}


class OtelTracing:
    """`ports.Tracing` with the OpenTelemetry SDK. `aclose` sends the remaining spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry", __version__)

    def begin(
        self, path: str, headers: Mapping[str, str], request: RequestId, model: str | None, ns: int
    ) -> "RequestTrace":
        """Begin the trace of a request to `path` that came at `ns` nanoseconds since the epoch."""
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
        """Send the remaining spans, within the exporter's own time limits."""
        await asyncio.to_thread(self._provider.shutdown)


def exporting(endpoint: str) -> OtelTracing:
    """Return tracing that sends batches of spans to an OTLP/HTTP collector, from an SDK thread."""
    provider = TracerProvider(resource=Resource.create({"service.name": "kvferry"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTracing(provider)


def _operation(path: str) -> str:
    if path.rstrip("/").endswith("/chat/completions"):
        return "chat"
    last = path.rstrip("/").rpartition("/")[2]
    return _OPERATIONS.get(last, last)


class RequestTrace:
    """`ports.Trace` of one request."""

    def __init__(self, tracer: trace.Tracer, span: Span, ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._ns = ns
        self._context = trace.set_span_in_context(span)

    def inject(self, headers: Sequence[Header]) -> list[Header]:
        """Return the headers with this request as the parent of the backend's spans."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        kept = [header for header in headers if header[0].lower().decode("latin-1") not in _CONTEXT]
        return kept + [(name.encode(), value.encode()) for name, value in carrier.items()]

    def attempt(self, told: Attempt) -> None:
        """Record an attempt at a backend: where the time went, and what the backend reported."""
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
        """End the trace, `ended_s` seconds after the request came.

        `error` is the kind of error that the router answered with.
        """
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._at(ended_s))

    def _child(self, name: str, start_s: float, end_s: float) -> None:
        span = self._tracer.start_span(name, self._context, start_time=self._at(start_s))
        span.end(self._at(max(end_s, start_s)))

    def _at(self, seconds: float) -> int:
        return self._ns + round(seconds * 1e9)
