"""Responses that end when their client does: one JSON, or server-sent events as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from octavo.server import errors
from octavo.server.limits import Deadline

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
"""After this much silence a comment is sent, so that nobody between us and the client gives the connection up."""
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def answer(request: Request, work: Awaitable[Result], deadline: Deadline) -> Result:
    """Wait for the work, no longer than that. Raises ClientGone when the client goes; then the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        with suppress(TimeoutError):
            async with deadline.run():
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGone
        raise errors.timed_out(deadline.seconds or 0)
    finally:
        await _end(task, gone)


def event(data: bytes) -> bytes:
    """One event; JSON has no line breaks of its own."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Events as they come, each in one write.

    The status waits for the first event (or the first keep-alive, which comes `queue_seconds` later than others), so
    that what goes wrong before is a status too; later errors are an event. The client's going, and the deadline,
    close `events`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_event: errors.ErrorEvent,
        deadline: Deadline,
        headers: Mapping[str, str],
        queue_seconds: float | None = None,
    ) -> None:
        super().__init__(b"", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._error_event, self._deadline = events, error_event, deadline
        self._queue_seconds = queue_seconds or 0.0
        self._started = False
        self._writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response (ASGI)."""
        sender = asyncio.create_task(self._send_all(send))
        gone, alive = asyncio.create_task(_gone(receive)), asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _end(sender, gone, alive)

    async def _send_all(self, send: Send) -> None:
        try:
            try:
                async with self._deadline.run():
                    async for data in self._events:
                        await self._write(send, data)
            finally:  # before anything more is sent: whoever does not read holds nothing any longer
                await self._events.aclose()
        except Exception as error:
            known = errors.timed_out(self._deadline.seconds or 0) if self._deadline.passed else errors.of_engine(error)
            if not self._started:
                raise (known or error) from error
            if known is None:
                logger.exception("a stream failed")
            await self._write(send, self._error_event(known or errors.bug()))
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._writes += 1
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            writes = self._writes
            await asyncio.sleep(KEEP_ALIVE_SECONDS if self._started else KEEP_ALIVE_SECONDS + self._queue_seconds)
            if self._writes == writes:
                await self._write(send, b": keep-alive\n\n")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has let go of what it held."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
