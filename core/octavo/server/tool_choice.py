"""What a chat's answer must look like: which tools may be called, or the format that was asked for."""

from __future__ import annotations

from typing import Any

from octavo.grammar import Grammar, ToolCalls
from octavo.grammar import Tool as GrammarTool
from octavo.server.errors import invalid
from octavo.server.openai_schema import ChatRequest
from octavo.server.tools_schema import NamedChoice, Tool

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def offered(body: ChatRequest) -> list[Tool]:
    """The tools that the model may call in its answer. Raises the 422 of a choice that cannot be made."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise invalid("`tools` has two functions of one name", "tools")
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    if not tools:
        raise invalid("`tool_choice` asks for a call, and there are no `tools`", "tool_choice")
    if choice == "required":
        return tools
    name = choice.function.name if isinstance(choice, NamedChoice) else choice
    if name not in names:
        raise invalid(f"`tool_choice` is {name!r}, which is none of `tools`: {', '.join(names)}", "tool_choice")
    return [tools[names.index(name)]]


def grammar(body: ChatRequest) -> tuple[Grammar | None, str]:
    """What the answer must look like, and the field that says so. Raises a 422 that names the field."""
    wanted = None if body.response_format is None else body.response_format.grammar()
    tools = offered(body)
    if not tools:
        return wanted, "response_format"
    if wanted is not None:
        raise invalid(
            "`response_format` and `tools` do not go together: an answer cannot be both. Leave one out, or set "
            "`tool_choice` to none",
            "response_format",
        )
    required = body.tool_choice not in (None, "auto")
    named = required and body.tool_choice != "required"
    parallel = body.parallel_tool_calls is not False and not named
    try:
        calls = tuple(GrammarTool(tool.function.name, _parameters(tool)) for tool in tools)
        return ToolCalls(calls, required, parallel), "tools"
    except ValueError as error:
        raise invalid(f"`tools`: {error}", "tools") from None


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        return _NOTHING
    if parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.function.name} must be of the type object, not {parameters['type']}")
    return {**parameters, "type": "object"}
