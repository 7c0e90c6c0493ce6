"""Tool calls in an answer's text, read as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.grammar import CALL_BEGIN, CALL_END

_HEAD = '\n{"name": "'
_MIDDLE = '", "arguments": '
_TAIL = f"}}\n{CALL_END}"  # no string of JSON holds a line break, and outside strings there is no angle bracket


@dataclass(frozen=True, slots=True)
class Piece:
    """What a piece of text brought: content, or something of the call `call`: its id and name, or arguments."""

    content: str = ""
    call: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""


class CallReader:
    """Splits a text that obeys `octavo.grammar.ToolCalls` into content and calls."""

    def __init__(self) -> None:
        self.calls = 0
        """Those that began."""
        self._held = ""
        self._awaited = CALL_BEGIN

    @property
    def called(self) -> bool:
        """Is there a call, and the last one whole? A stop text or the limit of tokens may have cut it off."""
        return self.calls > 0 and self._awaited == CALL_BEGIN

    def feed(self, text: str) -> Iterator[Piece]:
        """What can be said after this much more text."""
        self._held += text
        while (found := self._held.find(self._awaited)) >= 0:
            part, self._held = self._held[:found], self._held[found + len(self._awaited) :]
            yield from self._told(part)
            yield from self._next(part)
        if self._awaited != _MIDDLE:
            keep = _overlap(self._held, self._awaited)
            part, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            yield from self._told(part)

    def finish(self) -> Iterator[Piece]:
        """What had been held back; the rest of a marker is nothing that was said, unless it is in free text."""
        if self._awaited == CALL_BEGIN:
            yield from self._told(self._held)
        elif self._awaited == _TAIL and self._held.startswith(_TAIL[:2]):  # its end's marker was a stop text, say
            self._awaited = CALL_BEGIN
        self._held = ""

    def _told(self, part: str) -> Iterator[Piece]:
        if part and self._awaited == CALL_BEGIN and not self.calls:  # between calls there are line breaks alone
            yield Piece(content=part)
        elif part and self._awaited == _TAIL:
            yield Piece(call=self.calls - 1, arguments=part)

    def _next(self, part: str) -> Iterator[Piece]:
        """Behind a marker; `part` was in front of it."""
        if self._awaited == CALL_BEGIN:
            self._awaited = _MIDDLE
        elif self._awaited == _MIDDLE:
            self._awaited = _TAIL
            yield Piece(call=self.calls, id=f"call_{secrets.token_hex(12)}", name=part.removeprefix(_HEAD))
            self.calls += 1
        else:
            self._awaited = CALL_BEGIN


def _overlap(text: str, marker: str) -> int:
    """How much of the text's end may be the marker's beginning."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)
