"""Each query token as a row of its own: what is computed for it has shapes that its own context alone decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.kv.layout import AxesLayout, KVCache

AttendRow = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [1, heads, size], key and value [seen, kv_heads, size], all of which it sees -> [1, heads, size]."""


def apart(batch: AttentionBatch) -> AttentionBatch:
    """The same tokens, each a row that decodes; rows without tokens are gone."""
    counts = batch.query_starts.diff().long()
    tokens = int(counts.sum())
    ends = batch.query_starts[1:].long().repeat_interleave(counts)
    behind = ends - 1 - torch.arange(tokens, device=ends.device)
    contexts = batch.context_lengths.repeat_interleave(counts) - behind.int()
    return replace(
        batch,
        query_starts=torch.arange(tokens + 1, dtype=torch.int32, device=ends.device),
        context_lengths=contexts,
        block_table=batch.block_table.repeat_interleave(counts, dim=0),
        max_query=1,
        decodes=tokens,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one token sees: tokens from `first` on of those that its blocks hold."""

    blocks: Tensor
    """int64."""
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class EachPlan:
    """One step."""

    seen: tuple[Seen, ...]

    @property
    def rows(self) -> int:
        """Tokens."""
        return len(self.seen)

    @classmethod
    def build(cls, spec: AttentionSpec, size: int, table: Tensor, contexts: list[int]) -> EachPlan:
        """From a block table [tokens, width] int32 and each token's context length, 0 for padding."""
        return cls(tuple(_seen(spec, size, row, context) for row, context in zip(table.long(), contexts, strict=True)))

    def attend(self, query: Tensor, layout: AxesLayout, cache: KVCache, layer: int, attend_row: AttendRow) -> Tensor:
        """query [tokens, heads, size] -> the same shape, zeros for padding."""
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for token, seen in enumerate(self.seen):
            if seen.count:
                keys, values = (
                    held.flatten(0, 1)[seen.first : seen.first + seen.count].to(query.dtype)
                    for held in layout.read_blocks(cache, layer, seen.blocks)
                )
                out[token] = attend_row(query[token].clone()[None], keys, values)[0]  # aligned alike, whichever it is
        return out


def _seen(spec: AttentionSpec, size: int, table: Tensor, context: int) -> Seen:
    oldest = 0 if spec.window is None else max(context - spec.window, 0)
    begin = oldest // size
    return Seen(table[begin : -(-context // size)], oldest - begin * size, context - oldest)
