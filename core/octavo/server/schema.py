"""What the bodies of requests have in common, and how responses come into the OpenAPI description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from octavo.server.auth import is_open
from octavo.server.errors import ErrorBody, OpenAIErrorBody


class Body(BaseModel):
    """The body of a request. A value of another JSON type is refused, an unknown field is left aside."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


Text = Annotated[str, Field(max_length=2**31)]  # with any limit lone surrogates are refused, without one they are not
NonEmpty = Annotated[str, Field(min_length=1)]
Salt = Annotated[
    str | None,
    Field(
        max_length=256,
        description="Cached prefixes are shared only by requests of the same API key and the same salt.",
    ),
]
# An exclusive maximum: the description is written with floats, of which 2**64 - 1 is none.
Seed = Annotated[int | None, Field(ge=0, lt=2**64, description="The same seed, the same tokens.")]


def unsupported(*taken: object) -> BeforeValidator:
    """A field of which octavo serves only these values; its type says them once more, for the description."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in taken):
            allowed = "leave it out" + "".join(f", or give {json.dumps(one)}" for one in taken)
            raise ValueError(f"it is not supported yet: {allowed}")
        return value

    return BeforeValidator(check)


Nothing = Annotated[None, unsupported()]


_ERRORS = {
    400: "The body is not JSON.",
    401: "No API key, or a wrong one.",
    403: "Another API key may do it.",
    408: "The body did not come within a minute.",
    413: "The body is longer than payload_limit.",
    422: "A field is wrong; the message names it.",
    424: "A step failed in the engine.",
    429: "All places are taken: try again.",
    500: "The server failed.",
    503: "The engine is down, or the server is shutting down.",
    504: "The deadline has passed.",
}
_OF_ANY_KEY = tuple(status for status in _ERRORS if status != 403)


def reference(struct: type[msgspec.Struct], *, several: bool = False) -> dict[str, Any]:
    """A response's schema by its name."""
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{struct.__name__}"}
    return {"type": "array", "items": schema} if several else schema


def responses(
    struct: type[msgspec.Struct] | None = None,
    *,
    several: bool = False,
    stream: type[msgspec.Struct] | None = None,
    text: str | None = None,
    openai: bool = False,
    only: Sequence[int] = _OF_ANY_KEY,
) -> dict[int | str, dict[str, Any]]:
    """What a route answers with: its JSON, its events, its text of a media type, or nothing; and the errors."""
    error = reference(OpenAIErrorBody if openai else ErrorBody)
    said: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": {"application/json": {"schema": error}}}
        for status, meaning in _ERRORS.items()
        if status in only
    }
    content: dict[str, Any] = {}
    if struct is not None:
        content["application/json"] = {"schema": reference(struct, several=several)}
    if stream is not None:
        data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
        data["contentSchema"] = reference(stream)
        if openai:
            data = {"type": "string", "description": f"A {stream.__name__} as JSON; the last is [DONE]."}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content["text/event-stream"] = {"itemSchema": event}
    if text is not None:
        content[text] = {"schema": {"type": "string"}}
    said[200] = {"description": "The answer."} | ({"content": content} if content else {})
    return said


def describe(app: FastAPI, structs: Sequence[type[msgspec.Struct]], *, keys: bool) -> None:
    """Put into the app's OpenAPI description the responses' structs, and what needs an API key if there are any."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
            components = described.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            if keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                for path, methods in described["paths"].items():
                    for method, operation in methods.items():
                        operation["security"] = [] if is_open(path, method.upper()) else [{"key": []}]
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
