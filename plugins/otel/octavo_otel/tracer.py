"""A request as spans: one for all of it, and below it one each for queue, prefill and decoding.

The names are those of OpenTelemetry's semantic conventions for generative AI, where they have one; the others begin
with `octavo.`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from octavo.hooks import RequestSummary
from octavo_otel.export import TellingExporter, close_at_exit

OPERATION = "text_completion"
"""The convention's word: the engine continues tokens, a chat has been made such by the server."""
_FINISH_REASONS = {"eos": "stop"}
"""octavo's, in the words that clients know."""


class Tracer:
    """Makes spans of summaries and hands them to a thread that sends them."""

    def __init__(self, endpoint: str, model: str, service_name: str | None = None) -> None:
        """`service_name`: None leaves it to OpenTelemetry's own variables, and else to "octavo".

        They may also set sampler, headers, timeout, batches and resource attributes: OTEL_TRACES_SAMPLER,
        OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY and others.
        """
        resource = Resource.create({SERVICE_NAME: "octavo"}).merge(OTELResourceDetector().detect())
        if service_name is not None:
            resource = resource.merge(Resource({SERVICE_NAME: service_name}))
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(TellingExporter(endpoint)))
        close_at_exit(self.provider)
        self._model = model
        self._tracer = self.provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestSummary) -> None:
        """A request that has just ended."""
        end = time.time_ns()
        start = end - _nanoseconds(request.seconds)
        span = self._tracer.start_span(
            f"{OPERATION} {self._model}",
            self._propagator.extract({"traceparent": request.trace}),
            SpanKind.SERVER,
            self._attributes(request),
            start_time=start,
        )
        if span.is_recording():
            self._phases(span, request, start, end)
            if request.finish_reason == "error":
                span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def _phases(self, span: Span, request: RequestSummary, start: int, end: int) -> None:
        context = set_span_in_context(span)
        for name, begun, ended in _phases(request, start, end):
            self._tracer.start_span(name, context, start_time=begun).end(ended)

    def _attributes(self, request: RequestSummary) -> dict[str, AttributeValue]:
        said: dict[str, AttributeValue] = {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [_FINISH_REASONS.get(request.finish_reason, request.finish_reason)],
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "octavo.sequence": request.request_id,
            "octavo.preemptions": request.preemptions,
        }
        if request.label:
            said["octavo.request_id"] = request.label
        if request.sequences != 1:
            said["gen_ai.request.choice.count"] = request.sequences
        if request.first_token_seconds is not None:
            said["octavo.first_token_seconds"] = request.first_token_seconds
        if request.finish_reason == "error":
            said["error.type"] = "generation"
        return said


def _phases(request: RequestSummary, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Those that the request came to, with their beginning and end; the last one ends with it."""
    names, times = ["queue"], [start]
    for name, seconds in (("prefill", request.queue_seconds), ("decode", request.first_token_seconds)):
        if seconds is not None:
            names.append(name)
            times.append(start + _nanoseconds(seconds))
    return zip(names, times, [*times[1:], end], strict=True)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
