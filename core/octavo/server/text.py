"""Text to tokens, off the event loop: the tokenizers' own code releases the interpreter's lock."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.server import errors
from octavo.server.chat_template import render
from octavo.server.tools import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")


class TokenizedToken(msgspec.Struct):
    """A token of a text: `text[start:stop]`."""

    id: int
    text: str
    start: int
    stop: int


class Texts:
    """The tokenizer of the served model, in threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, workers: int) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self.token_text = lru_cache(maxsize=None)(self._token_text)  # as many entries as the vocabulary at most

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises the 422 of a model that has none."""
        if self._tokenizer is None:
            raise errors.invalid("this model has no tokenizer: give the prompt as token ids on /v1/completions")
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Can the model chat?"""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt."""
        tokenizer = self.tokenizer

        def work() -> list[int]:
            ids: list[int] = tokenizer(_whole(text), add_special_tokens=special_tokens)["input_ids"]
            return ids

        return await self.run(work)

    async def offsets(self, text: str, *, special_tokens: bool = True) -> list[TokenizedToken]:
        """Each token with the characters that it stands for."""
        tokenizer = self.tokenizer
        if not tokenizer.is_fast:
            raise errors.invalid("this model's tokenizer does not say which characters a token stands for")

        def work() -> list[TokenizedToken]:
            encoded = tokenizer(_whole(text), add_special_tokens=special_tokens, return_offsets_mapping=True)
            spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            return [TokenizedToken(id, text[start:stop], start, stop) for id, (start, stop) in spans]

        return await self.run(work)

    async def chat(
        self, turns: list[Turn], tools: list[dict[str, Any]], prompt: str | None, options: Mapping[str, Any]
    ) -> str:
        """The turns in the model's chat template: see `octavo.server.chat_template`."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise errors.ApiError(
                422, "template_error",
                "Template error: this model has no chat template: use /generate or /v1/completions", "messages",
            )  # fmt: skip
        taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() & options.keys()
        if taken:
            raise errors.invalid(f"`chat_template_kwargs` may not have {sorted(taken)[0]!r}", "chat_template_kwargs")
        try:
            return await self.run(lambda: render(tokenizer, turns, tools, prompt, options))
        except Exception as error:  # the template is a program that came with the model: it may raise anything
            raise errors.ApiError(422, "template_error", f"Template error: {error}", "messages") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that was given as tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def is_special(self, token_id: int) -> bool:
        """Is it one of the tokens that are no text?"""
        return token_id in self._special

    def _token_text(self, token_id: int) -> str:
        """One token on its own, special ones too; a part of a character is U+FFFD."""
        return str(self._tokenizer.decode([token_id])) if self._tokenizer is not None else ""

    async def run(self, work: Callable[[], Result]) -> Result:
        """Something that takes a while, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _whole(text: str) -> str:
    """The text itself. Raises a 422 for half a surrogate pair, which a chat's extra fields may bring."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.invalid(f"character {error.start} of the prompt is half of a surrogate pair") from None
    return text
