"""The application: routes behind the checks that every request passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware

from octavo import __version__
from octavo.server import about, errors, openai_chat, openai_completions, tgi
from octavo.server.auth import ApiKeys
from octavo.server.errors import ErrorBody, OpenAIErrorBody
from octavo.server.limits import PayloadLimit
from octavo.server.logs import RequestLog
from octavo.server.openai_answers import ChatCompletion, ChatCompletionChunk, Completion
from octavo.server.schema import describe
from octavo.server.service import Service
from octavo.server.sse import ClientGone
from octavo.server.text import TokenizedToken
from octavo.server.tgi_schema import GenerateResponse, StreamResponse
from octavo.server.ui import routes as ui
from octavo.server.ui.state import PageState
from octavo.settings import Settings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.async_engine import AsyncEngine

_ANSWERS = (
    ErrorBody, OpenAIErrorBody, GenerateResponse, StreamResponse, ChatCompletion, ChatCompletionChunk, Completion,
    TokenizedToken, about.Info, about.Models, about.ChatTokenizeResponse, PageState,
)  # fmt: skip


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """The routes in front of a running engine, which stays its owner's to close."""
    service = Service(engine, settings)
    app = FastAPI(
        title="octavo",
        version=__version__,
        description="Language models from a paged key-value cache, on TGI's routes and OpenAI's.",
        middleware=_middleware(settings),
        redoc_url=None,
    )
    app.state.service = service
    errors.install(app)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return errors.response(request.url.path, errors.ApiError(499, "dropped", "The client is gone"))

    for routes in (openai_chat.routes, openai_completions.routes, tgi.routes, about.routes):  # the busiest first
        app.include_router(routes(service))
    if settings.ui:
        app.include_router(ui.routes(service))
    describe(app, _ANSWERS, keys=bool(settings.api_key))
    return app


def _middleware(settings: Settings) -> list[Middleware]:
    """Outermost first. Preflight requests bring no key: browsers ask before they send it."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_allow_origin,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    return [
        Middleware(RequestLog),
        *([cors] if settings.cors_allow_origin else []),
        *([Middleware(ApiKeys, settings.api_key)] if settings.api_key else []),
        Middleware(PayloadLimit, settings.payload_limit),
    ]
