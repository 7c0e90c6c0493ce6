"""Tells OpenTelemetry of each request that has ended, where `OTLP_ENDPOINT` says where to send it."""

from __future__ import annotations

import os

from octavo.hooks import RequestSummary, hookimpl

TRACER = None
if ENDPOINT := os.environ.get("OTLP_ENDPOINT"):
    from octavo_otel.tracer import Tracer

    # Made when the plugin is loaded: between two steps it would hold one of them up.
    TRACER = Tracer(ENDPOINT, os.environ.get("MODEL_ID") or "demo", os.environ.get("OTLP_SERVICE_NAME"))


@hookimpl
def octavo_request_finished(request: RequestSummary) -> None:
    """The request as a span."""
    if TRACER is not None:
        TRACER.record(request)
