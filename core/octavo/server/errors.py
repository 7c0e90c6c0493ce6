"""What goes wrong, as a status and a body: TGI's shape, and OpenAI's under /v1."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from octavo.async_engine import Draining, EngineDied, RequestRefused

logger = logging.getLogger(__name__)

ErrorEvent = Callable[["ApiError"], bytes]
"""How a stream tells an error."""

RETRY_AFTER = {"Retry-After": "1"}


class ErrorBody(msgspec.Struct):
    """An error in TGI's shape."""

    error: str
    error_type: str


class OpenAIErrorDetail(msgspec.Struct):
    """What OpenAI's clients show of an error."""

    message: str
    type: str
    code: str
    http_status_code: int
    param: str | None = None


class OpenAIErrorBody(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: OpenAIErrorDetail


class ApiError(HTTPException):
    """Ends a request. `kind` is TGI's error_type; `param` names the field at fault."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.kind, self.param = kind, param


def invalid(message: str, param: str | None = None) -> ApiError:
    """The request asks for what cannot be: TGI's 422."""
    return ApiError(422, "validation", f"Input validation error: {message}", param)


def overloaded(limit: int) -> ApiError:
    """The server holds as many sequences as it may."""
    message = f"Model is overloaded: all {limit} places of max_concurrent_requests are taken, try again"
    return ApiError(429, "overloaded", message, headers=RETRY_AFTER)


def queued_too_long(seconds: float) -> ApiError:
    """The engine had no room for the request in time."""
    message = (
        f"Model is overloaded: the request waited {seconds:g} s (max_queue_seconds) and did not begin to run, try again"
    )
    return ApiError(429, "queue_timeout", message, headers=RETRY_AFTER)


def timed_out(seconds: float) -> ApiError:
    """The deadline of the request has passed."""
    return ApiError(504, "timeout", f"The request was not answered within its {seconds:g} s: it was cancelled")


def too_slow(part: str, seconds: float) -> ApiError:
    """The client has stopped in the middle of its request."""
    message = f"The request's {part} did not come within {seconds:g} s"
    return ApiError(408, "timeout", message, headers={"Connection": "close"})


def failed(message: str) -> ApiError:
    """A step failed in the engine: TGI's 424."""
    return ApiError(424, "generation", f"Request failed during generation: {message}")


def cancelled() -> ApiError:
    """The engine was told to stop before the answer was whole."""
    return ApiError(503, "draining", "The server is shutting down: the request was cancelled", headers=RETRY_AFTER)


def bug() -> ApiError:
    """The server itself is at fault."""
    return ApiError(500, "internal", "The server failed: its log has the reason")


def of_engine(error: Exception) -> ApiError | None:
    """What the engine's refusals and failures are to a client; None for other errors."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return invalid(str(error))
        case Draining():
            return ApiError(503, "draining", f"The server is shutting down: {error}", headers=RETRY_AFTER)
        case EngineDied():
            return ApiError(503, "engine_died", f"The engine died: {error}", headers=RETRY_AFTER)
    return None


def body(path: str, error: ApiError) -> bytes:
    """An error's JSON, in the shape that clients of this path read."""
    shape: ErrorBody | OpenAIErrorBody = ErrorBody(error.detail, error.kind)
    if path.startswith("/v1/"):
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
        shape = OpenAIErrorBody(OpenAIErrorDetail(error.detail, kind, error.kind, error.status_code, error.param))
    return msgspec.json.encode(shape)


def response(path: str, error: ApiError) -> Response:
    """An error as a whole response."""
    return Response(body(path, error), error.status_code, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Every error of the app leaves it in one of the two shapes."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        known = error if isinstance(error, ApiError) else _of_starlette(request, error)
        return response(request.url.path, known)

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return response(request.url.path, _of_pydantic(error.errors()))

    @app.exception_handler(RequestRefused)
    @app.exception_handler(Draining)
    @app.exception_handler(EngineDied)
    async def engine(request: Request, error: Exception) -> Response:
        return response(request.url.path, of_engine(error) or bug())

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return response(request.url.path, bug())


def _of_starlette(request: Request, error: HTTPException) -> ApiError:
    kinds = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    if error.status_code == 405:  # the router names the methods of the first route with this path alone
        methods = request.app.openapi()["paths"].get(request.url.path, {})
        headers["Allow"] = ", ".join(method.upper() for method in sorted(methods)) or headers["Allow"]
    if error.status_code == 400:  # the reason is in no language of ours: a decoder's, or too deep a recursion
        return ApiError(
            400, "validation", "The body is not JSON: send UTF-8, not compressed, not nested deeply", "body"
        )
    return ApiError(error.status_code, kinds.get(error.status_code, "validation"), message, headers=headers)


def _of_pydantic(problems: Any) -> ApiError:
    """The first few problems, each with the field's path; a body that is no JSON is 400."""
    syntax = next((problem for problem in problems if problem["type"] == "json_invalid"), None)
    if syntax is not None:
        reason = syntax.get("ctx", {}).get("error", "")
        return ApiError(400, "validation", f"The body is not JSON: {reason} at character {syntax['loc'][-1]}", "body")
    if all(len(problem["loc"]) < 2 and problem["loc"][0] == "body" for problem in problems):
        return invalid("the body must be a JSON object, sent with `Content-Type: application/json`", "body")
    told = [f"`{_field(problem['loc'])}`: {_message(problem['msg'])}" for problem in problems[:4]]
    return invalid("; ".join(dict.fromkeys(told)), _field(problems[0]["loc"]))


def _field(loc: tuple[str | int, ...]) -> str:
    """A field's path as one would write it; names of a union's members are left out."""
    members = ("str", "int", "float", "bool")
    parts = [part for part in loc[1:] if isinstance(part, int) or (part.isidentifier() and part not in members)]
    return ".".join(map(str, parts)) or str(loc[0])


def _message(text: str) -> str:
    return text.removeprefix("Value error, ").replace("Input should", "it should")
