"""Registers the processor of requests with a grammar."""

from __future__ import annotations

from collections.abc import Set
from importlib.util import find_spec
from typing import Any

from octavo.hooks import GrammarRefused, LogitsProcessor, hookimpl


@hookimpl
def octavo_logits_processors(params: Any, tokenizer: Any, end_ids: Set[int]) -> LogitsProcessor | None:
    """One for a request with a grammar."""
    if params.grammar is None:
        return None
    if find_spec("llguidance") is None:
        raise GrammarRefused("grammars need llguidance, which is not installed: pip install 'octavo[grammar]'")
    if tokenizer is None:
        from octavo_grammar.check import checked

        return checked(params.grammar)
    from octavo_grammar.processor import processor

    return processor(params.grammar, tokenizer, frozenset(end_ids), frozenset(params.stop_token_ids))
