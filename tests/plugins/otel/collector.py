"""A collector of traces: what speaks OTLP over HTTP, by the protocol's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Span:
    """One span, in Python's own types."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Where spans arrive."""

    spans: list[Span] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    status: int = 200
    url: str = ""

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [
                    Span(
                        one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(), one.kind,
                        one.start_time_unix_nano, one.end_time_unix_nano, one.status.code, _plain(one.attributes),
                        resource,
                    )
                    for one in scope.spans
                ]  # fmt: skip

    def requests(self, trace: str | None = None) -> list[Span]:
        """The spans that stand for requests, of a trace or of all."""
        return [one for one in self.spans if one.attributes and trace in (None, one.trace)]

    def phases(self, request: Span) -> list[Span]:
        """A request's, in order."""
        return sorted((one for one in self.spans if one.parent == request.id), key=lambda one: one.start)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector that listens, until the end of the context."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
