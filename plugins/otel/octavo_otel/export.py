"""The way to the collector: in a thread, through a queue that drops what it has no room for."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Where collectors take traces, below their address (OTLP over HTTP)."""
LAST_SECONDS = 2.0
"""How long the end of the process waits for the last spans to be taken."""


class _Reasons(logging.Filter):
    """Keeps back what the exporter says of every attempt; of each batch, the first says why it failed."""

    first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Nothing passes."""
        self.first = self.first or record.getMessage()
        return False


_reasons = _Reasons()


class TellingExporter(SpanExporter):
    """Sends spans, and says in the log once that the collector cannot be reached and once that it can again."""

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        self._exporter = OTLPSpanExporter(self._url)
        self._reached = True
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_reasons)
        logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # it warns of each span that it drops

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; the thread's only work, so that nothing else waits for it."""
        result = self._exporter.export(spans)
        reached = result is SpanExportResult.SUCCESS
        if reached != self._reached:
            self._reached = reached
            if reached:
                logger.info("%s takes traces again", self._url)
            else:
                logger.warning("%s takes no traces, they are dropped until it does: %s", self._url, _reasons.first)
        _reasons.first = ""
        return result

    def shutdown(self) -> None:
        """Send no more, nor try again what failed."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def close_at_exit(provider: TracerProvider) -> None:
    """Send what is left when the process ends, but wait no longer than a moment for it."""
    asked, done = threading.Event(), threading.Event()

    def work() -> None:
        asked.wait()
        provider.shutdown()
        done.set()

    def close() -> None:
        asked.set()
        done.wait(LAST_SECONDS)

    threading.Thread(target=work, name="traces", daemon=True).start()  # no thread can be started at the exit itself
    atexit.register(close)
