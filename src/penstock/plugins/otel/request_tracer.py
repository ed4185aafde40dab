"""Traces of requests: one span per request, with a child span per phase.

penstock /v1/chat/completions ───────────────────────────────
  wait ── restore ── prefill ── decode ── wait (preempted) ...
"""

from __future__ import annotations

from functools import cache

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock import __version__
from penstock.server.recent import Recent

PHASES = {
    "waiting": "wait",
    "preempted": "wait",
    "restoring": "restore",
    "prefilling": "prefill",
    "running": "decode",
}
"""Names of child spans by state of the sequence."""
SECOND = 1_000_000_000


class RequestTracer:
    """Listener that creates the spans of a request after its end, from recorded times."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer("penstock", __version__)
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...

    def ended(self, recent: Recent) -> None:
        begin = recent.started
        end = begin + (recent.seconds or 0.0)
        span = self._tracer.start_span(
            f"penstock {recent.label}",
            self._propagator.extract({"traceparent": recent.traceparent}),
            SpanKind.SERVER,
            {
                "http.route": recent.label,
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": recent.prompt_tokens,
                "gen_ai.usage.output_tokens": recent.completion_tokens,
                "gen_ai.response.finish_reasons": [recent.finish or recent.state],
                "penstock.cached_tokens": recent.cached_tokens,
                "penstock.request_id": recent.request_id,
            },
            start_time=_nanoseconds(begin),
        )
        if recent.state == "failed":
            span.set_status(StatusCode.ERROR, recent.finish)
        context = set_span_in_context(span)
        phases = [("waiting", begin), *recent.phases]
        ends = [seconds for _, seconds in phases[1:]] + [end]
        for (state, seconds), until in zip(phases, ends, strict=True):
            if state in PHASES:
                child = self._tracer.start_span(
                    PHASES[state], context, start_time=_nanoseconds(seconds)
                )
                child.end(_nanoseconds(max(seconds, until)))
        span.end(_nanoseconds(end))


def trace_requests(endpoint: str, model: str) -> RequestTracer:
    """Return a listener that sends spans to an OTLP endpoint, in a thread of the SDK."""
    return RequestTracer(_provider(endpoint), model)


@cache
def _provider(endpoint: str) -> TracerProvider:
    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _resource() -> Resource:
    """Return the attributes of this process; those of OTEL_* variables replace penstock's."""
    usual = Resource({"service.name": "penstock", "service.version": __version__})
    return Resource.create(usual.merge(OTELResourceDetector().detect()).attributes)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)
