"""A line for each request, and the id that its client gets too."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("octavo.server.requests")

_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_QUIET = frozenset({"/health", "/ping", "/metrics", "/ui/state"})
"""Paths that are asked every few moments: their lines would hide the others."""


class RequestLog:
    """Gives each request an id, its own `X-Request-Id` where it is plain text, and logs how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 499  # nginx's number for a client that left before there was a status

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, with_id)
        finally:
            fields = {
                "request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status,
                "seconds": round(time.perf_counter() - started, 6), **scope["state"].get("log", {}),
            }  # fmt: skip
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            logger.log(level, "%(method)s %(path)s %(status)d in %(seconds).3f s", fields, extra={"fields": fields})
