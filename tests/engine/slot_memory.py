"""A device without a model: each slot remembers the text up to the token written to it, and rows read it all back.

The next token follows from the whole text read, so that a wrong slot, a block reused too early or a copy made too late
shows in the tokens, and at the place where it happened.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_MODULUS = 2**61 - 1
_DIRTY = -1

Integers = NDArray[np.int64]


def digest(text: int, tokens: Iterable[int]) -> list[int]:
    """The digests of a text after each of these tokens, given its digest before them."""
    digests = []
    for token in tokens:
        text = (text * 1_000_003 + int(token) + 1) % _MODULUS
        digests.append(text)
    return digests


def next_token(digests: Sequence[int], vocabulary: int) -> int:
    """What follows a text, by what each of its slots holds."""
    return (sum(digests) >> 7) % vocabulary


def continuation(prompt: Sequence[int], count: int, vocabulary: int) -> list[int]:
    """The tokens that follow a prompt, by definition: what any schedule must bring."""
    digests = digest(0, prompt)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(digests, vocabulary))
        digests += digest(digests[-1], tokens[-1:])
    return tokens


class SlotMemory:
    """The cache as a device holds it; every slot starts dirty."""

    def __init__(self, num_blocks: int, block_size: int, vocabulary: int) -> None:
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.blocks = np.full((num_blocks, block_size), _DIRTY, dtype=np.int64)
        self.copies = 0

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, all sources being read before a target is written, as devices may do it."""
        pairs = list(copies)
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        held = [self.blocks[source].copy() for source, _ in pairs]
        for target, content in zip(targets, held, strict=True):
            self.blocks[target] = content
        self.copies += len(pairs)

    def write(self, slots: Integers, tokens: Iterable[int], before: Integers) -> None:
        """Write a row's tokens; `before`: the slots of what precedes them in its text."""
        previous = int(self._flat[before[-1]]) if before.size else 0
        self._flat[slots] = digest(previous, tokens)

    def read(self, slots: Integers) -> int:
        """Read a row's context; returns the next token."""
        return next_token(self._flat[slots].tolist(), self.vocabulary)

    def check(self, slots: Integers, tokens: Sequence[int]) -> None:
        """Raise AssertionError unless a row's context is this text."""
        found, expected = self._flat[slots].tolist(), digest(0, tokens)
        differing = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        assert not differing, f"positions {differing} of the context hold another text"

    @property
    def _flat(self) -> Integers:
        return self.blocks.reshape(-1)
