"""What schemathesis checks besides its own: a refusal names what is wrong."""

import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response

_WITHOUT_FIELD = ("body", "X-Request-Timeout")
"""What else than a field can be wrong."""


@schemathesis.check
def names_the_field(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """A 400 or 422 says which field it is about, by a name that the body's description has."""
    if response.status_code not in (400, 422):
        return
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    known = _names(case.operation.schema.raw_schema["components"]["schemas"])
    words = set(re.findall(r"[A-Za-z_-]+", message))
    assert words & (known | set(_WITHOUT_FIELD)), f"the message names no field: {message}"


def _names(schemas: Any) -> set[str]:
    return {name for schema in schemas.values() for name in schema.get("properties", {})}
