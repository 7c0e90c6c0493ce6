"""One request of a benchmark, for processes that load no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """One request: the prompt's token ids, and how many tokens its answer has."""

    prompt: Sequence[int]
    answer_tokens: int
