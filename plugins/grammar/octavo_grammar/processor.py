"""Lets a sequence take only tokens that its grammar allows, and end only where the grammar may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance
import numpy as np
import torch
from torch import Tensor

from octavo.grammar import Grammar
from octavo.hooks import GrammarRefused
from octavo_grammar.compile import compiled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def processor(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int], stop_ids: frozenset[int]
) -> GrammarProcessor:
    """For one new sequence. Raises GrammarRefused."""
    if not end_ids:
        raise GrammarRefused("this model has no end-of-sequence token, with which a text would end that is complete")
    return GrammarProcessor(grammar, compiled(grammar, tokenizer, end_ids).deep_copy(), end_ids, stop_ids)


class GrammarProcessor:
    """The grammar's state behind one sequence's tokens, and the mask that follows from it."""

    def __init__(
        self, grammar: Grammar, matcher: llguidance.LLMatcher, end_ids: frozenset[int], stop_ids: frozenset[int]
    ) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._taken = 0
        """Tokens that the matcher has seen: it may be behind, and catches up."""
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64)

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Minus infinity for all that may not come next. Raises GrammarError where the grammar is too much at last."""
        if len(output_ids) < self._taken:
            self._matcher.reset()
            self._taken = 0
        if not self._matcher.consume_tokens(list(output_ids[self._taken :])):
            raise GrammarError(self._matcher.get_error())
        self._taken = len(output_ids)
        return logits.masked_fill_(torch.from_numpy(~self._allowed(len(logits))).to(logits.device), float("-inf"))

    def _allowed(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which tokens may come next, bool [vocabulary]. The end tokens may where the text may end, and only there.

        So may the request's own stop tokens; as part of the text they come wherever the grammar takes them.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        allowed = np.zeros(vocabulary, dtype=np.bool_)
        known = np.unpackbits(mask, count=min(vocabulary, 8 * len(mask)), bitorder="little")
        allowed[: len(known)] = known
        may_end = self._matcher.is_accepting()
        allowed[self._end_ids] = may_end
        if may_end:
            allowed[self._stop_ids] = True
        return allowed


class GrammarError(RuntimeError):
    """A grammar turned out too costly on the way; the sequence ends with this reason."""
