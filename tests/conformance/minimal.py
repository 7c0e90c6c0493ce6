"""A correct backend in straightforward PyTorch, and the places where it can be broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import TOKEN_MAJOR, KVCache, LayoutType

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Plan:
    """One step, in storage of its own: a bucket's is refreshed in place."""

    starts: Tensor
    contexts: Tensor
    table: Tensor
    longest: int

    @classmethod
    def of(cls, batch: AttentionBatch, width: int = 0) -> Plan:
        table = batch.block_table.new_zeros(batch.rows, max(width, batch.block_table.shape[1]))
        plan = cls(batch.query_starts.clone(), batch.context_lengths.clone(), table, batch.max_context)
        plan.refresh(batch)
        return plan

    def fits(self, batch: AttentionBatch) -> bool:
        return batch.block_table.shape[1] <= self.table.shape[1] and torch.equal(self.starts, batch.query_starts)

    def refresh(self, batch: AttentionBatch) -> None:
        self.contexts.copy_(batch.context_lengths)
        self.table[:, : batch.block_table.shape[1]] = batch.block_table
        self.longest = batch.max_context


class MinimalBackend(AttentionBackend):
    """Row by row in float32, keys gathered slot by slot."""

    name = "minimal"
    platform = "test"
    contract = 1
    capabilities = Capabilities(
        dtypes=FLOATS,
        kv_dtypes=FLOATS,
        head_sizes=(16, ...),
        block_sizes=(16, ...),
        features=frozenset({"window", "softcap", "sinks", "alibi"}),
        graphs="all",
        prefix_caching=True,
        batch_invariant=True,
    )
    layout_type: ClassVar[LayoutType] = TOKEN_MAJOR

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(spec, block_size, device, options, sinks)
        self.plans: dict[int, Plan] = {}

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """A bucket's plan is made once, with room for 20 blocks a row, and refreshed in place while that is enough."""
        if bucket is None:
            return Plan.of(batch)
        held = self.plans.get(bucket)
        if held is None or not held.fits(batch):
            held = self.plans[bucket] = Plan.of(batch, 20)
        else:
            held.refresh(batch)
        return held

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """[tokens, heads, head_size]."""
        out = torch.zeros_like(query)
        starts = plan.starts.tolist()
        sinks = None if self.sinks is None else self.sinks[layer]
        for row, context in enumerate(plan.contexts.tolist()):
            own = slice(starts[row], starts[row + 1])
            if own.start < own.stop and context:
                keys, values = self.read(cache, layer, plan.table[row].long(), context)
                out[own] = self.attend_tokens(query[own].float(), keys.float(), values.float(), sinks)
        return out

    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's context, each [context, kv_heads, head_size]; table: [width] int64."""
        position = torch.arange(context)
        block = table[position // self.block_size]
        return self.layout.read(cache, layer, block * self.block_size + position % self.block_size)

    def attend_tokens(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """As `attend_row`; each token in a product of its own where its bits must not depend on the others."""
        if not self.spec.batch_invariant:
            return self.attend_row(query, keys, values, sinks)
        ends = range(keys.shape[0] - query.shape[0] + 1, keys.shape[0] + 1)
        each = [
            self.attend_row(one[None], keys[:end], values[:end], sinks) for one, end in zip(query, ends, strict=True)
        ]
        return torch.cat(each)

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """query [new, heads, head_size], keys and values [context, kv_heads, head_size] -> as query, float32."""
        new, context = query.shape[0], keys.shape[0]
        grouped = query.reshape(new, self.spec.kv_heads, self.spec.group, self.spec.head_size)
        scores = torch.einsum("qkgd,ckd->kgqc", grouped, keys) * self.spec.scale
        if self.spec.softcap is not None:
            scores = self.cap(scores, self.spec.softcap)
        if self.spec.alibi_slopes is not None:
            scores = scores + self.bias(self.spec.alibi_slopes, new, context)
        scores = self.mask(scores, self.visible(new, context))
        if sinks is not None:
            column = sinks.view(self.spec.kv_heads, self.spec.group, 1, 1).expand(-1, -1, new, 1)
            scores = torch.cat([scores, column], dim=-1)
        return self.weigh(self.softmax(scores), values).flatten(1, 2)

    def cap(self, scores: Tensor, softcap: float) -> Tensor:
        """Scores that come from the scale."""
        return (scores / softcap).tanh() * softcap

    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        """ALiBi's, one slope a query head: [kv_heads, group, new, context]."""
        distance = torch.arange(context) - torch.arange(context - new, context)[:, None]
        return torch.tensor(slopes).view(self.spec.kv_heads, self.spec.group, 1, 1) * distance

    def weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights [kv_heads, group, new, context, and one of a sink] -> [new, kv_heads, group, head_size]."""
        return torch.einsum("kgqc,ckd->qkgd", weights[..., : len(values)], values)

    def visible(self, new: int, context: int) -> Tensor:
        """[new, context]: does a query see a key?"""
        distance = torch.arange(context - new, context)[:, None] - torch.arange(context)
        return (distance >= 0) & (distance < (self.spec.window or context))

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Hide what is not visible."""
        return scores.masked_fill(~visible, float("-inf"))

    def softmax(self, scores: Tensor) -> Tensor:
        """Over the last axis."""
        return scores.softmax(dim=-1)
