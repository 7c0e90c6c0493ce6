"""A line for each request, and what names it there: an id that its client gets too, and the client's trace."""

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
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)
_TENANT_DIGITS = 8
"""Of the digest of the API key: enough to tell keys apart, too few to look one up by."""


class RequestLog:
    """Gives each request an id, its own `X-Request-Id` where it is plain text, and logs how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        trace = traceparent(headers.getlist("traceparent"))
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "trace": trace, "tenant": "", "log": {}}
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
                "seconds": round(time.perf_counter() - started, 6), **state["log"],
            }  # fmt: skip
            if trace:
                fields["trace_id"] = trace.split("-")[1]
            if state["tenant"]:
                fields["tenant"] = state["tenant"][:_TENANT_DIGITS]
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            logger.log(level, "%(method)s %(path)s %(status)d in %(seconds).3f s", fields, extra={"fields": fields})


def traceparent(given: list[str]) -> str:
    """The header of W3C Trace Context, as far as its first version goes; empty where it is to be ignored."""
    match = _TRACEPARENT.fullmatch(given[0].strip(" \t")) if len(given) == 1 else None
    if match is None or (match["more"] and match[0].startswith("00")):
        return ""
    return match[0].removesuffix(match["more"] or "")
