"""What schemathesis checks besides its own: a refusal names what is wrong."""

import re
from collections.abc import Iterator
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response


@schemathesis.check
def names_the_field(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """A 400 or 422 says which field of the request it is about, or that it is about the whole body."""
    if response.status_code not in (400, 422):
        return
    error = response.json()["error"]
    message = (error if isinstance(error, str) else error["message"]).removeprefix("Input validation error: ")
    description: Any = case.operation.schema.raw_schema
    body = description["paths"][case.operation.path][case.operation.method.lower()].get("requestBody", {})
    known = {"body", *_fields(body, description["components"]["schemas"])}
    assert known & set(re.findall(r"\w+", message)), f"the message names no field: {message}"


def _fields(part: Any, schemas: Any) -> Iterator[str]:
    """The names of fields anywhere in a part of the description."""
    if isinstance(part, list):
        for one in part:
            yield from _fields(one, schemas)
    if isinstance(part, dict):
        yield from part.get("properties", {})
        if "$ref" in part:
            yield from _fields(schemas[part["$ref"].rpartition("/")[2]], schemas)
        for one in part.values():
            yield from _fields(one, schemas)
