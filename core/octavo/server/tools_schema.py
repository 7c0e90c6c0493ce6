"""Tools as OpenAI's bodies describe them, and the calls in a chat's earlier turns."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.schema import Body, NonEmpty, Text

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="The JSON schema of its arguments, an object. Unset: it takes none."
    )
    strict: bool | None = Field(default=None, description="Arguments fit the schema whether it is set or not.")


class Tool(Body):
    """A function, in OpenAI's wrapping."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: NonEmpty


class NamedChoice(Body):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class CalledFunction(Body):
    """What was called, with which arguments: JSON as text, or the object."""

    name: NonEmpty
    arguments: Text | dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As templates read it: the arguments as the object that they are."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):  # cut off by max_tokens, say: the model sees what it wrote
                arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As templates read it."""
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}
