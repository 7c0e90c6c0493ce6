"""How much the server takes on: sequences at once, bytes of a body, seconds for a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server import errors


@dataclass(slots=True)
class Admission:
    """Places for sequences. There is no line in front of them: who finds none is told so at once."""

    limit: int
    taken: int = 0

    @contextmanager
    def places(self, wanted: int) -> Iterator[None]:
        """Hold that many places. Raises the 429, or a 422 where they are more than there are."""
        if wanted > self.limit:
            raise errors.invalid(
                f"the request asks for {wanted} sequences, `prompt` times `n` or `best_of`, and the server runs at "
                f"most {self.limit} (max_concurrent_requests): ask for fewer"
            )
        if self.taken + wanted > self.limit:
            raise errors.overloaded(self.limit)
        self.taken += wanted
        try:
            yield
        finally:
            self.taken -= wanted


class Deadline:
    """How long a request may take. What it ends asks it, not a clock, whether it was the deadline: clocks differ."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._running: asyncio.Timeout | None = None

    def run(self) -> asyncio.Timeout:
        """From now on; to be entered."""
        self._running = asyncio.timeout(self.seconds)
        return self._running

    @property
    def passed(self) -> bool:
        """Has it come? True before what it cancels learns of it."""
        return self._running is not None and self._running.expired()


def seconds_allowed(request: Request, default: float | None) -> float | None:
    """How long a request may take: what its X-Request-Timeout says, never more than the server's own limit."""
    asked = request.headers.get("x-request-timeout")
    if asked is None:
        return default
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise errors.invalid(f"`X-Request-Timeout` is {asked!r}: give seconds, above 0", "X-Request-Timeout")
    return seconds if default is None else min(seconds, default)


BODY_SECONDS = 60.0
"""For the whole body of a request."""


class PayloadLimit:
    """Refuses bodies that are too long, at their header or as soon as they are longer, and those that do not come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.limit:
            await errors.response(scope["path"], self._too_large())(scope, receive, send)
            return
        read, whole = 0, False
        ends = asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal read, whole
            try:
                async with asyncio.timeout_at(None if whole else ends):
                    message = await receive()
            except TimeoutError:
                raise errors.too_slow("body", BODY_SECONDS) from None
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self.limit:
                raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> errors.ApiError:
        message = f"The body is longer than {self.limit} bytes (payload_limit)"
        return errors.ApiError(413, "validation", message, headers={"Connection": "close"})
