"""How the server's two processes write their logs: lines for people, or JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record brings in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(as_json: bool) -> None:
    """Send everybody's log to standard error, for people or for machines.

    For machines, warnings and what no one caught are lines of the log too: Python itself would write them as text.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the hub's requests
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    logger.critical("nothing caught this", exc_info=(kind, error, where))


def _uncaught_in_thread(raised: threading.ExceptHookArgs) -> None:
    error = raised.exc_value or raised.exc_type()
    logger.critical("nothing caught this in a thread", exc_info=(raised.exc_type, error, raised.exc_traceback))


@contextmanager
def held() -> Iterator[None]:
    """Keep what is logged until the end of the context, within which `configure` is to say how it is written."""
    holding, root = _Holding(), logging.getLogger()
    before, root.handlers = root.handlers, [holding]
    try:
        yield
    finally:
        if holding in root.handlers:
            root.handlers = before
        for record in holding.records:
            logging.getLogger(record.name).handle(record)


class _Holding(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record)
