"""HTTP as uvicorn speaks it, and limits on what comes beside bodies: who never ends a request is let go."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server import errors

HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers, or of the trailers behind its body: about so many, since what arrives at once
is looked at together."""
HEAD_SECONDS = 60.0
"""From the connection, or the first byte of a further request, to the end of its headers; and for the rest of a body
that was answered before it was whole."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    _in_head = True
    _all_head = True
    """Has what arrived last neither ended a head nor brought something of a body?"""
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Some bytes of it."""
        self._all_head = True
        super().data_received(data)
        if not self._all_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            message = f"The request's headers are longer than {HEAD_BYTES} bytes"
            self._refuse(errors.ApiError(431, "validation", message))
        elif self._in_head:
            self._wait()

    def on_headers_complete(self) -> None:
        """The body follows, which has limits of its own."""
        self._in_head = self._all_head = False
        self._head_bytes = 0
        self._end_wait()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        self._all_head, self._head_bytes = False, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A further request may follow."""
        self._in_head, self._all_head, self._head_bytes = True, False, 0
        self._end_wait()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Nobody asks for the rest of the body any more, if there is one to come."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._end_wait()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._answers():  # which line breaks behind its request do not end
            self._wait()
        else:
            self._refuse(errors.too_slow("headers", HEAD_SECONDS))

    def _answers(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _refuse(self, error: errors.ApiError) -> None:
        """Ends the connection; the reason is told where an answer is due, and none under way."""
        if self._in_head and not self._answers():
            body = errors.body("/", error)
            head = f"HTTP/1.1 {error.status_code} \r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self.transport.close()
