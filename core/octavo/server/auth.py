"""Who is it: API keys, and the tenant of the cache that each of them stands for."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server import errors

_OPEN = frozenset({"/health", "/ping"})


def is_open(path: str, method: str) -> bool:
    """Needs it no key? What looks after the server has none."""
    return path in _OPEN or (path == "/" and method in ("GET", "HEAD"))


def is_first_keys(path: str) -> bool:
    """Does it tell of all tenants together? Who sees the sums before and after knows what another one did."""
    return path == "/metrics" or _is_page(path)


def _is_page(path: str) -> bool:
    return path == "/ui" or path.startswith("/ui/")


class ApiKeys:
    """Lets in who brings a key, and notes whose cache is theirs in the scope's state, as `tenant`.

    The tenant is a digest of the key, so that the key itself goes no further. Browsers bring a key as the password of
    Basic authentication, once the page has asked for it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.tenants = {key.encode(): hashlib.sha256(key.encode()).hexdigest() for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] == "http" and self.tenants and not is_open(scope["path"], scope["method"]):
            tenant = self._tenant(_given_key(scope))
            if tenant is None:
                await errors.response(scope["path"], _unauthorized(scope["path"]))(scope, receive, send)
                return
            if is_first_keys(scope["path"]) and tenant != next(iter(self.tenants.values())):
                await errors.response(scope["path"], _forbidden(scope["path"]))(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, given: bytes) -> str | None:
        """All keys are compared, each in constant time: how long it takes says nothing about any of them."""
        found = None
        for key, tenant in self.tenants.items():
            if hmac.compare_digest(key, given):
                found = tenant
        return found


def _given_key(scope: Scope) -> bytes:
    """The key that a request brings; empty, which no key is, if it brings none."""
    headers = Headers(scope=scope)
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    if scheme.lower() == "basic" and _not_forged(scope["method"], headers):
        try:
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _not_forged(method: str, headers: Headers) -> bool:
    """Can no page of another site have made the browser send it? It adds its stored password to those requests too.

    Forms, and scripts that ask nobody, send other types than JSON. What only reads tells such a page nothing.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return method in ("GET", "HEAD") or content_type == "application/json"


def _unauthorized(path: str) -> errors.ApiError:
    """A browser asks its user for a password where Basic is offered: at the page alone."""
    message, asked = "An API key is needed: send the header `Authorization: Bearer KEY`", "Bearer"
    if _is_page(path):
        message += ", or give a browser the key as the password, with any name"
        asked = 'Basic realm="octavo", charset="UTF-8"'
    return errors.ApiError(401, "unauthorized", message, headers={"WWW-Authenticate": asked})


def _forbidden(path: str) -> errors.ApiError:
    message = f"{path} tells of all tenants together: it takes the first of the server's API keys"
    return errors.ApiError(403, "forbidden", message)
