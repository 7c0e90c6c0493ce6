"""From an answer's text to the message of a chat, whole or in pieces: content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET

from octavo.outputs import StreamedToken
from octavo.server.openai import reason
from octavo.server.openai_answers import (
    ChatMessage,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from octavo.server.tool_calls import CallReader, Piece

Reason = Literal["stop", "length", "tool_calls"]


def message(text: str, with_tools: bool) -> tuple[ChatMessage, bool]:
    """A whole answer, and whether it calls a tool: one whose last call was cut off does not."""
    if not with_tools:
        return ChatMessage(text), False
    reader = CallReader()
    content, calls = "", list[ToolCall]()
    for piece in (*reader.feed(text), *reader.finish()):
        content += piece.content
        if piece.name:
            calls.append(ToolCall(piece.id, FunctionCall(piece.name, "")))
        if piece.arguments:
            calls[piece.call].function.arguments += piece.arguments
    return ChatMessage(content if content or not calls else None, tool_calls=calls or UNSET), reader.called


def finish_reason(engines: str | None, called: bool) -> Reason | None:
    """The engine's reason in OpenAI's words; an answer that calls has one of its own."""
    told = reason(engines)
    return "tool_calls" if called and told == "stop" else told


class Deltas:
    """One streamed answer, token by token."""

    def __init__(self, with_tools: bool) -> None:
        self._reader = CallReader() if with_tools else None
        self._begun = False

    def next(self, token: StreamedToken) -> tuple[list[Delta], Reason | None]:
        """What a token brings, if anything yet; and why the answer ends, if it does: that belongs to the last delta."""
        reader, ended = self._reader, token.finish_reason is not None
        if reader is None:
            deltas = [Delta(token.text)] if token.text or not self._begun else []
        else:
            pieces = [*reader.feed(token.text), *(reader.finish() if ended else ())]
            deltas = [*([] if self._begun else [Delta()]), *_deltas(pieces)]
        if not self._begun:
            self._begun, deltas[0].role = True, "assistant"
        if not deltas and (ended or token.logprob is not None):
            deltas = [Delta()]
        return deltas, finish_reason(token.finish_reason, reader is not None and reader.called)


def _deltas(pieces: Iterable[Piece]) -> list[Delta]:
    return [Delta(piece.content) if piece.content else Delta(tool_calls=[_call(piece)]) for piece in pieces]


def _call(piece: Piece) -> ToolCallDelta:
    if piece.name:
        return ToolCallDelta(piece.call, FunctionCallDelta(piece.name, ""), piece.id, "function")
    return ToolCallDelta(piece.call, FunctionCallDelta(arguments=piece.arguments))
