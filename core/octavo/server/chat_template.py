"""A chat as one text, by the model's template; tools too, whether the template knows of them or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.grammar import CALL_BEGIN
from octavo.server.tools import Turn, described

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE: list[Turn] = [{"role": "user", "content": "probe"}]
_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}


def render(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], prompt: str | None,
    options: Mapping[str, Any],
) -> str:  # fmt: skip
    """The turns as the model reads them; a last one of the assistant's is to be continued. Raises what templates raise.

    tools: in OpenAI's shape; prompt: the words in front of them, where the template has none.
    """
    continued = turns[-1]["role"] == "assistant"
    if _writes_calls(tokenizer, str(tokenizer.chat_template)):
        options = {"tools": list(tools), **options} if tools else options
    else:
        system = _takes_system(tokenizer, str(tokenizer.chat_template))
        turns = described(turns, [tool["function"] for tool in tools], prompt, system=system)
    return _apply(tokenizer, turns, add_generation_prompt=not continued, continue_final_message=continued, **options)


def _apply(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(list(turns), tokenize=False, **options))


@lru_cache(maxsize=4)
def _writes_calls(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Does the template tell the model of tools, to be called between the markers that are read here?"""
    try:
        told = _apply(tokenizer, _PROBE, tools=[_TOOL])
    except Exception:  # it is a program of someone else's
        return False
    return CALL_BEGIN in told


@lru_cache(maxsize=4)
def _takes_system(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    try:
        return "octavo" in _apply(tokenizer, [{"role": "system", "content": "octavo"}, *_PROBE])
    except Exception:
        return False
