"""Tells OpenTelemetry of each request that has ended, where `OTLP_ENDPOINT` says where to send it."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from octavo.hooks import RequestSummary, hookimpl

ENDPOINT = os.environ.get("OTLP_ENDPOINT")

if ENDPOINT or TYPE_CHECKING:
    from octavo_otel.tracer import Tracer  # now, and not between two steps


@cache
def _tracer(endpoint: str) -> Tracer:
    return Tracer(endpoint, os.environ.get("MODEL_ID") or "demo", os.environ.get("OTLP_SERVICE_NAME"))


@hookimpl
def octavo_request_finished(request: RequestSummary) -> None:
    """The request as a span."""
    if ENDPOINT:
        _tracer(ENDPOINT).record(request)
