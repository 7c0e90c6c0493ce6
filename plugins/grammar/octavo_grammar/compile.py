"""From octavo's grammars to llguidance's, compiled once for all who ask for the same."""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llguidance
import llguidance.hf
from transformers import PreTrainedTokenizerFast

from octavo.grammar import CALL_BEGIN, CALL_END, Grammar, JsonObject, JsonSchema, Regex, ToolCalls
from octavo.hooks import GrammarRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JSON: Any = {
    # As models write it, on one line or indented; without a bound, one that is at a loss adds white space for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": r"\n?[ ]{0,16}",
    "item_separator": ",",
    "key_separator": ":",
    # What cannot be enforced is refused: an answer that only nearly fits the schema is a fault found late.
    "lenient": False,
    "coerce_one_of": False,
}
# A tenth and a fiftieth of the library's own: what they stop takes seconds, and no schema that people write comes near.
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=100_000, max_grammar_size=10_000, verbose_errors=False)
_MOST_SECONDS = 2.0
"""Of processor time: what they let through and still takes longer is refused behind it."""


@lru_cache(maxsize=256)
def compiled(grammar: Grammar, tokenizer: PreTrainedTokenizerBase | None, end_ids: frozenset[int]) -> (
    llguidance.LLMatcher
):  # fmt: skip
    """A matcher at the start, to be copied. Raises GrammarRefused for what cannot be enforced, or matches nothing.

    Without a tokenizer it is for bytes: good for nothing but to see whether the grammar is in order.
    """
    vocabulary = _vocabulary(tokenizer, end_ids)
    started = time.thread_time()
    matcher = llguidance.LLMatcher(vocabulary, source(grammar), log_level=0, limits=_LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise GrammarRefused(f"grammar is not valid: {_reason(first)}")
    if (seconds := time.thread_time() - started) > _MOST_SECONDS:
        raise GrammarRefused(f"the grammar takes {seconds:.1f} s to compile, at most {_MOST_SECONDS:g} are allowed")
    return matcher


def _reason(matcher: llguidance.LLMatcher) -> str:
    reason = matcher.get_error()
    if reason.startswith("NoExtension"):
        return "nothing matches it"
    of_regex = re.search("^error: (.+)$", reason, re.MULTILINE)  # below the whole pattern, drawn with arrows
    return of_regex[1] if of_regex else reason[:500].strip()


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: PreTrainedTokenizerBase | None, end_ids: frozenset[int]) -> llguidance.LLTokenizer:
    """The tokenizer as llguidance has it, which takes a second for a large one and holds the interpreter's lock."""
    if tokenizer is None:
        return llguidance.LLTokenizer("byte")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise GrammarRefused(f"grammars need a fast tokenizer, and this model's is a {type(tokenizer).__name__}")
    try:
        return llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(end_ids))
    except ValueError as error:
        raise GrammarRefused(f"llguidance cannot read this model's tokenizer: {error}") from error


def source(grammar: Grammar) -> str:
    """The grammar in llguidance's words."""
    match grammar:
        case JsonSchema(schema):
            return llguidance.LLMatcher.grammar_from_json_schema(str(schema), overrides=_JSON)
        case JsonObject():
            return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case Regex(pattern):
            # Digits are ASCII's: who writes \d for a number does not want Arabic ones.
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(pattern, 'd')}/")
        case ToolCalls():
            return llguidance.LLMatcher.grammar_from_lark("\n".join(_tool_calls(grammar)))


def _tool_calls(grammar: ToolCalls) -> list[str]:
    """Lines of Lark. A lazy lexeme ends where the marker first does, so that free text holds none."""
    more = f"({json.dumps(chr(10) + CALL_BEGIN)} call)*" if grammar.parallel else ""
    calls = " | ".join(f"call_{index}" for index in range(len(grammar.tools)))
    lines = [
        "%llguidance {}",
        f"start: {json.dumps(CALL_BEGIN)} call {more}" if grammar.required else f"start: TEXT | begin call {more}",
        f"call: {json.dumps(chr(10))} ({calls}) {json.dumps(chr(10) + CALL_END)}",
    ]
    if not grammar.required:
        lines += [f"begin[lazy]: TEXT {json.dumps(CALL_BEGIN)}", r"TEXT: /(.|\n)*/"]
    for index, tool in enumerate(grammar.tools):
        head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        lines.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(json.loads(str(tool.parameters)) | {'x-guidance': _JSON})}")
    return lines
