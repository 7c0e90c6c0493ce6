"""The floor of what attention in PyTorch costs: its fused kernel on keys that lie one behind the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.contract import AttentionBackend, AttentionBatch, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import HEAD_MAJOR, AxesLayout, KVCache

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows side by side of as many queries over as many keys."""

    first: int
    """Of their query tokens."""
    rows: int
    new: int
    keys: Tensor
    """[rows, kv_heads, context, head_size]; for prompts [rows, heads, context, head_size]."""
    values: Tensor


@dataclass(slots=True)
class Plan:
    """A step, and what it reads, copied out of the cache by the first `attend`."""

    batch: AttentionBatch
    runs: list[Run] = field(default_factory=list)


class DenseBackend(AttentionBackend):
    """No cache that is served from lies like this: what its copies cost is not measured.

    The heads of a group meet their key head as one matrix where rows decode; for prompts keys are copied for each head.
    """

    name = "dense"
    platform = "peer"
    contract = 1
    priority = -1
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=_FLOATS, head_sizes=(...,), block_sizes=(32, ...), prefix_caching=True
    )
    layout_type = HEAD_MAJOR

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """Anywhere."""
        return None

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Copies nothing yet: a plan sees no cache."""
        return Plan(batch)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """The first call copies, those after it compute."""
        plan.runs = plan.runs or self._runs(plan.batch, cache, layer)
        out = torch.empty_like(query)
        for run in plan.runs:
            own = slice(run.first, run.first + run.rows * run.new)
            out[own] = self._attend(query[own].reshape(run.rows, run.new, *query.shape[1:]), run).flatten(0, 1)
        return out

    def _attend(self, query: Tensor, run: Run) -> Tensor:
        """query: [rows, new, heads, head_size]."""
        rows, new, heads, size = query.shape
        if new == 1:
            folded = query.reshape(rows, self.spec.kv_heads, self.spec.group, size)
            return self._fused(folded, run, None).reshape(rows, new, heads, size)
        context = run.keys.shape[2]
        mask = None
        if context > new:
            mask = torch.ones(new, context, dtype=torch.bool, device=query.device).tril(context - new)
        return self._fused(query.transpose(1, 2), run, mask, causal=mask is None).transpose(1, 2)

    def _fused(self, query: Tensor, run: Run, mask: Tensor | None, causal: bool = False) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, run.keys, run.values, mask, is_causal=causal, scale=self.spec.scale
        )

    def _runs(self, batch: AttentionBatch, cache: KVCache, layer: int) -> list[Run]:
        starts, contexts = batch.query_starts.tolist(), batch.context_lengths.tolist()
        shapes = [(end - start, context) for (start, end), context in zip(pairwise(starts), contexts, strict=True)]
        edges = [0, *(row for row in range(1, len(shapes)) if shapes[row] != shapes[row - 1]), len(shapes)]
        return [self._run(batch, cache, layer, (first, end), starts[first]) for first, end in pairwise(edges)]

    def _run(self, batch: AttentionBatch, cache: KVCache, layer: int, rows: tuple[int, int], start: int) -> Run:
        layout = self.layout
        assert isinstance(layout, AxesLayout)
        first, end = rows
        context, new = int(batch.context_lengths[first]), int(batch.query_starts[first + 1]) - start
        table = batch.block_table[first:end, : -(-context // self.block_size)].long()
        held = [
            part.reshape(end - first, -1, *part.shape[2:])[:, :context].transpose(1, 2).to(self.spec.dtype)
            for part in layout.read_blocks(cache, layer, table.flatten())
        ]
        keys, values = (
            (part if new == 1 else part.repeat_interleave(self.spec.group, dim=1)).contiguous() for part in held
        )
        return Run(start, end - first, new, keys, values)
