"""Who is it: API keys, and the tenant of the cache that each of them stands for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server import errors

OPEN = frozenset({"/health", "/ping"})
"""Paths that need no key: what looks after the server has none."""


class ApiKeys:
    """Lets in who brings a key, and notes whose cache is theirs in the scope's state, as `tenant`.

    The tenant is a digest of the key, so that the key itself goes no further.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.tenants = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] == "http" and self.tenants and not self._is_open(scope):
            tenant = self._tenant(Headers(scope=scope).get("authorization", ""))
            if tenant is None:
                await errors.response(scope["path"], _unauthorized())(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in OPEN or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD"))

    def _tenant(self, authorization: str) -> str | None:
        """All keys are compared, each in constant time: how long it takes says nothing about any of them."""
        scheme, _, given = authorization.partition(" ")
        found = None
        for key, tenant in self.tenants.items():
            if hmac.compare_digest(key, given.strip().encode()):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _unauthorized() -> errors.ApiError:
    message = "An API key is needed: send the header `Authorization: Bearer KEY`"
    return errors.ApiError(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})
