"""Routes of the page: its files, and what it shows."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from octavo.server.openai import encode
from octavo.server.schema import responses
from octavo.server.service import Service
from octavo.server.ui.state import PageState, Viewer

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Nothing from another host, nothing inline, and no other page may put this one into a frame.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def routes(service: Service) -> APIRouter:
    """The routes, bound to a running server."""
    router = APIRouter(tags=["Page"], default_response_class=Response)
    folder = resources.files("octavo.server.ui") / "page"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if _suffix(file.name) in _TYPES}
    viewer = Viewer(service)

    @router.get("/ui/state", responses=responses(PageState, only=[401]))
    async def state(request: Request) -> Response:
        """The blocks, the prefix tree and the requests as they stand; of other API keys, numbers alone."""
        tenant = request.scope["state"].get("tenant", "")
        return Response(encode(await viewer.state(tenant)), media_type="application/json", headers=_NOT_KEPT)

    @router.get("/ui", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html")

    @router.get("/ui/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return _file(name)

    def _file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has {', '.join(sorted(files))}")
        return Response(files[name], media_type=_TYPES[_suffix(name)], headers=HEADERS)

    return router


_NOT_KEPT = HEADERS | {"Cache-Control": "no-store"}


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
