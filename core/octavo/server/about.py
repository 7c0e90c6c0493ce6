"""Routes that say something about the server: health, info, models, metrics, tokens of a text."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from octavo import __version__
from octavo.server import errors
from octavo.server.openai import encode
from octavo.server.openai_chat import prompt
from octavo.server.openai_schema import ChatRequest
from octavo.server.schema import Body, NonEmpty, responses
from octavo.server.service import Service
from octavo.server.sse import answer
from octavo.server.text import TokenizedToken


class Info(msgspec.Struct):
    """The server: TGI's fields, and how the engine came to be as it is."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    validation_workers: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    model_dtype: str
    model_device_type: str
    attention: str
    selection: dict[str, Any]
    block_size: int
    prefix_caching: bool
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int | None
    weight_bytes: int
    workspace_bytes: int
    activation_bytes: int
    graph_bytes: int
    cache_bytes: int
    chat_template: bool
    engine_process_id: int


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    owned_by: str
    object: str = "model"


class Models(msgspec.Struct):
    """All of them: one."""

    data: list[Model]
    object: str = "list"


class ChatTokenizeResponse(msgspec.Struct):
    """A chat in the model's template, and its tokens."""

    tokenize_response: list[TokenizedToken]
    templated_text: str


class TokenizeRequest(Body):
    """A text."""

    inputs: NonEmpty


def routes(service: Service) -> APIRouter:
    """The routes, bound to a running server."""
    router = APIRouter(tags=["About"], default_response_class=Response)
    started = int(time.time())

    _health(router, service)
    _tokens(router, service)

    @router.get("/info", responses=responses(Info, only=[401]))
    async def info() -> Response:
        """What is served, with which limits, and how the attention backend was chosen."""
        return _json(_info(service))

    @router.get("/v1/models", responses=responses(Models, openai=True, only=[401]))
    async def models() -> Response:
        """The model."""
        return _json(Models([Model(service.model, started, service.model)]))

    @router.get("/metrics", responses=responses(only=[401, 403], text="text/plain"))
    async def metrics(request: Request) -> Response:
        """For Prometheus, which says in which of its formats. Of several API keys, the first one's alone."""
        stats, healthy = await service.engine.stats(), service.engine.healthy
        text, media_type = service.metrics.text(stats, healthy, request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    return router


def _health(router: APIRouter, service: Service) -> None:
    async def health() -> Response:
        """Can the server answer? Needs no API key."""
        if service.engine.draining:
            raise errors.ApiError(503, "healthcheck", "unhealthy: the server is shutting down")
        if not service.engine.healthy:
            raise errors.ApiError(503, "healthcheck", "unhealthy: the engine is down")
        return Response()

    for path in ("/health", "/ping", "/"):
        router.get(path, responses=responses(only=[503]))(health)
        router.head(path, include_in_schema=False)(health)


def _tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", responses=responses(TokenizedToken, several=True, only=_CHECKED))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """A text's tokens, and where they stand in it."""
        return _json(await answer(request, service.texts.offsets(body.inputs), service.caller(request).deadline))

    @router.post("/chat_tokenize", responses=responses(ChatTokenizeResponse, only=_CHECKED))
    async def chat_tokenize(body: ChatRequest, request: Request) -> Response:
        """A chat in the model's template, and the tokens of that."""

        async def work() -> ChatTokenizeResponse:
            text = await prompt(service, body)
            return ChatTokenizeResponse(await service.texts.offsets(text, special_tokens=False), text)

        return _json(await answer(request, work(), service.caller(request).deadline))


_CHECKED = (400, 401, 408, 413, 422, 500, 504)


def _json(told: object) -> Response:
    return Response(encode(told), media_type="application/json")


def _info(service: Service) -> Info:
    engine, settings = service.engine.info, service.settings
    return Info(
        model_id=service.model,
        model_sha=engine.revision,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_input_tokens=engine.max_input_tokens,
        max_total_tokens=engine.max_total_tokens,
        max_client_batch_size=settings.max_client_batch_size,
        validation_workers=settings.validation_workers,
        router="octavo",
        version=__version__,
        sha=None,
        docker_label=None,
        model_dtype=engine.dtype,
        model_device_type=engine.device,
        attention=engine.backend,
        selection=engine.selection,
        block_size=engine.block_size,
        prefix_caching=engine.prefix_caching,
        max_batch_prefill_tokens=engine.max_batch_prefill_tokens,
        max_batch_total_tokens=engine.max_batch_total_tokens,
        max_batch_size=engine.max_batch_size,
        weight_bytes=engine.weight_bytes,
        workspace_bytes=engine.workspace_bytes,
        activation_bytes=engine.activation_bytes,
        graph_bytes=engine.graph_bytes,
        cache_bytes=engine.cache_bytes,
        chat_template=service.texts.has_chat_template,
        engine_process_id=engine.process_id,
    )
