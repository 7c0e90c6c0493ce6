"""What a text must look like: the kinds of grammar that a request can ask for, checked as far as core knows them.

Whether a schema or a regular expression can be enforced is for the plugin to say that does it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

MOST_BYTES: Final = 32768
"""Of all schemas, or of the pattern, of one request."""
CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """JSON that this schema describes. A mapping is kept as its JSON text, in its order, which the answers follow."""

    schema: str | Mapping[str, Any]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", _schema_text(self.schema))
        _check_size("the JSON schema", str(self.schema))


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A text that this pattern matches as a whole: no look-around, no back-references."""

    pattern: str

    def __post_init__(self) -> None:
        _check_size("the regular expression", self.pattern)


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    parameters: str | Mapping[str, Any]
    """The JSON schema of its arguments, an object."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "parameters", _schema_text(self.parameters))


class ToolCalls(msgspec.Struct, frozen=True, tag="tool_calls"):
    """Calls of tools, each a JSON object between `<tool_call>` and `</tool_call>` on lines of their own.

    required: the answer begins with a call; without it, it may be any text, and calls behind it.
    parallel: there may be several.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    def __post_init__(self) -> None:
        if not self.tools:
            raise ValueError("there are no tools to call: give at least one")
        _check_size("the tools' schemas", "".join(f"{tool.name}{tool.parameters}" for tool in self.tools))


Grammar = JsonSchema | JsonObject | Regex | ToolCalls


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    """A schema as JSON. Raises ValueError for what JSON cannot say: NaN, halves of surrogate pairs, endless depth."""
    try:
        given = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(given, Mapping):
            raise ValueError("it is no JSON object")
        return json.dumps(given, allow_nan=False)
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be read: {error}") from None


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair at character {error.start}") from None
    if size > MOST_BYTES:
        raise ValueError(f"{name} has {size} bytes: at most {MOST_BYTES} are taken")
