"""Tools, calls and their results as plain text: for templates that know nothing of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.grammar import CALL_BEGIN, CALL_END

Turn = dict[str, Any]

PROMPT = (
    "You may call functions to answer. These are available, one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write nothing but this, with the function's name and arguments:\n{CALL_BEGIN}\n"
    f'{{{{"name": "NAME", "arguments": {{{{...}}}}}}}}\n{CALL_END}'
)


def described(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], prompt: str | None, *, system: bool
) -> list[Turn]:
    """Turns of the three common roles alone: calls and results as text, functions in the system's turn.

    prompt: what to say in front of the tools instead of octavo's own words. system: does the template take such turns?
    """
    told: list[Turn] = []
    for turn in turns:
        plain = _plain(turn)
        if told and plain["role"] == told[-1]["role"] == "user" and "tool" in (turn["role"], told[-1].get("was")):
            told[-1]["content"] += "\n" + plain["content"]
        else:
            told.append(plain)
    if tools:
        _add(told, _instructions(tools, prompt), system)
    return [{key: value for key, value in turn.items() if key != "was"} for turn in told]


def _plain(turn: Turn) -> Turn:
    if turn["role"] == "tool":
        content = f"<tool_response>\n{turn['content']}\n</tool_response>"
        return {"role": "user", "content": content, "was": "tool"}
    calls = [
        f"{CALL_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}"
        for call in turn.get("tool_calls") or ()
    ]
    plain = {key: value for key, value in turn.items() if key != "tool_calls"}
    return plain | {"content": "\n".join([turn["content"], *calls] if turn["content"] else calls)}


def _instructions(tools: Sequence[Mapping[str, Any]], prompt: str | None) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if prompt is not None:
        return f"{prompt}\n{listed}"
    return PROMPT.format(tools=listed)


def _add(turns: list[Turn], instructions: str, system: bool) -> None:
    """To the first turn, so that the prompts of a chat's turns begin alike and find each other in the cache."""
    role = "system" if system else "user"
    if turns[0]["role"] == role:
        parts = [turns[0]["content"], instructions] if system else [instructions, turns[0]["content"]]
        turns[0]["content"] = "\n\n".join(parts)
    else:
        turns.insert(0, {"role": role, "content": instructions})
