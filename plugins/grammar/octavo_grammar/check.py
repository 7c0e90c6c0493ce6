"""Is a grammar in order? Asked where nothing is computed, so without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from octavo.grammar import Grammar
from octavo_grammar.compile import compiled


@dataclass(frozen=True)
class Checked:
    """Stands for the processor that the grammar would get beside a tokenizer."""

    grammar: Grammar

    def __call__(self, output_ids: Sequence[int], logits: object) -> NoReturn:
        """Raises: there is no sequence without a tokenizer."""
        raise RuntimeError("this grammar was checked without a tokenizer: ask for a processor with the model's own")


def checked(grammar: Grammar) -> Checked:
    """Raises GrammarRefused where it cannot be enforced, whatever the model."""
    compiled(grammar, None, frozenset())
    return Checked(grammar)
