"""What a batch's rows hold: the same numbers for every backend, and the true answer to some of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.bench.batches import Batch
from octavo.conformance.stage import check_form
from octavo.conformance.truth import Fault, attention, deviation, judge, limit

_CHECKED = 8
"""Rows of a batch whose answers are compared with the truth, and tokens of each."""
_PIECE = 1 << 16
"""Tokens that are written at once: what a layout needs for it beside the cache is small."""


class Attending:
    """One layer's `attend`, planned. A graph that captures a call fills the answer of that call when it is replayed."""

    def __init__(
        self, backend: AttentionBackend, new: tuple[Tensor, Tensor, Tensor], cache: Any, batch: AttentionBatch
    ) -> None:
        self._backend, self._new, self._cache = backend, new, cache
        captured = backend.capabilities_on(backend.device).graphs != "none" and batch.decodes == batch.rows
        self._plan = backend.plan(batch, batch.rows if captured else None)  # as an engine's captured step has it
        self.answer: Tensor = new[0]
        """Of the last call."""

    def __call__(self) -> None:
        """Attend."""
        self.answer = self._backend.attend(*self._new, self._cache, self._plan, 0)


class Inputs:
    """Random numbers from one seed, exact in the cache's dtype; zeros would be faster on some chips.

    query: [new tokens, heads, head_size]; keys, values: [tokens of all contexts, kv_heads, head_size], row by row.
    """

    def __init__(self, spec: AttentionSpec, batch: Batch, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def drawn(tokens: int, heads: int) -> Tensor:
            shape = (tokens, heads, spec.head_size)
            return torch.randn(shape, generator=generator, device=device, dtype=spec.dtype)

        self.spec, self.batch = spec, batch
        self.query = drawn(sum(batch.new), spec.heads)
        held = (drawn(sum(batch.contexts), spec.kv_heads).to(spec.kv_dtype).to(spec.dtype) for _ in range(2))
        self.keys, self.values = held
        self._starts = [0, *accumulate(batch.contexts)]
        """Of each row in `keys`, and the end."""
        ends = zip(self._starts[1:], batch.new, strict=True)
        self._new = torch.cat([torch.arange(end - new, end) for end, new in ends]).to(device)
        """[new tokens] int64: where in `keys` this step's stand."""

    def attending(self, backend: AttentionBackend) -> Attending:
        """For one backend, over a cache of its own that holds the rows in shuffled blocks."""
        batch, where, size = self.batch, self.query.device, backend.block_size
        spare = backend.capabilities_on(backend.device).spare_slots
        blocks = [-(-(context + spare) // size) for context in batch.contexts]
        table = shuffled(blocks).to(where)
        cache = backend.layout.allocate(sum(blocks) + 1, where)
        within = torch.arange(size, device=where)
        slots = [(row[:count, None] * size + within).flatten() for row, count in zip(table, blocks, strict=True)]
        for row, own in enumerate(slots):
            self._write(backend, cache, row, own)
        counts = zip(slots, batch.contexts, batch.new, strict=True)
        step = AttentionBatch(
            query_starts=torch.tensor([0, *accumulate(batch.new)], dtype=torch.int32, device=where),
            context_lengths=torch.tensor(batch.contexts, dtype=torch.int32, device=where),
            block_table=table.to(torch.int32),
            slots=torch.cat([own[context - new : context] for own, context, new in counts]),
            max_query=max(batch.new),
            max_context=max(batch.contexts),
            decodes=sum(new == 1 for new in batch.new),
        )
        return Attending(backend, (self.query, self.keys[self._new], self.values[self._new]), cache, step)

    def _write(self, backend: AttentionBackend, cache: Any, row: int, slots: Tensor) -> None:
        """The row's last token stands in the rest of its last block too: a peer may not bear what is undefined."""
        context = self.batch.contexts[row]
        tokens = self._starts[row] + torch.arange(len(slots), device=slots.device).clamp(max=context - 1)
        for own, where in zip(tokens.split(_PIECE), slots.split(_PIECE), strict=True):
            backend.layout.write(cache, 0, self.keys[own], self.values[own], where)

    def error(self, answer: Tensor) -> float:
        """Of the worst token that is checked, relative to the truth. Raises Fault beyond what rounding may do."""
        check_form(self.query, answer)
        if not answer.isfinite().all():
            raise Fault("it is not finite")
        starts = [0, *accumulate(self.batch.new)]
        found = deviation(answer[[starts[row] + nth for row, nth in self._checked]], self._truth)
        judge(found, limit(self.spec), "it is wrong")
        return found.error

    @cached_property
    def _checked(self) -> list[tuple[int, int]]:
        """Rows, and which of their new tokens: the first, the last, and some between."""
        new = self.batch.new
        return [(row, nth) for row in _spread(len(new)) for nth in _spread(new[row])]

    @cached_property
    def _truth(self) -> Tensor:
        """[tokens that are checked, heads, head_size] float64 on the CPU."""
        return torch.cat([self._attended(row, nth) for row, nth in self._checked])

    def _attended(self, row: int, nth: int) -> Tensor:
        """[1, heads, head_size]: head by head, so that float64 keys take little memory."""
        new, end = self.batch.new[row], self._starts[row + 1]
        query = self.query[sum(self.batch.new[:row]) + nth][None]
        seen = slice(self._starts[row], end - new + nth + 1)
        heads = (query.split(self.spec.group, 1), self.keys[seen].split(1, 1), self.values[seen].split(1, 1))
        return torch.cat([attention(*head, None, spec=self.spec) for head in zip(*heads, strict=True)], 1).cpu()


def shuffled(blocks: Sequence[int]) -> Tensor:
    """[rows, most blocks]: each row's own, from all over the cache; block 0 is nobody's."""
    ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int64)
    for row, (start, end) in enumerate(pairwise([0, *accumulate(blocks)])):
        table[row, : end - start] = ids[start:end]
    return table


def _spread(count: int) -> list[int]:
    """Some of `range(count)`, evenly, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, _CHECKED)).round().int().tolist()
