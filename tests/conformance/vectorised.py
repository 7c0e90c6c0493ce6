"""A correct backend without a look at the host: any step of it can be captured, on a device that captures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, Capabilities
from octavo.kv.layout import HEAD_MAJOR

WIDTH = 24
"""Blocks of a row that a captured plan has room for."""


@dataclass(frozen=True)
class TokenPlan:
    """One line for each query token, in storage of its own."""

    slots: Tensor
    """[tokens, keys] int64: where the keys of the token's row lie."""
    hidden: Tensor
    """[tokens, keys] bool."""
    distance: Tensor
    """[tokens, keys] int64: key position - query position."""

    def refresh(self, other: TokenPlan) -> None:
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


class Vectorised(AttentionBackend):
    """Every query token gathers all of its row's blocks."""

    name = "vectorised"
    platform = "test"
    contract = 1
    capabilities = Capabilities(
        dtypes=(torch.float32, torch.bfloat16),
        kv_dtypes=(torch.float32, torch.bfloat16),
        head_sizes=(64,),
        block_sizes=(16, 24),
        features=frozenset({"window", "softcap", "sinks", "alibi"}),
        graphs="all",
        prefix_caching=True,
    )
    layout_type = HEAD_MAJOR

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> TokenPlan:
        width = batch.block_table.shape[1] if bucket is None else WIDTH
        new = self._plan(batch, width)
        if bucket is None:
            return new
        held: dict[Any, TokenPlan] = self.__dict__.setdefault("held", {})
        key = (bucket, len(batch.slots))
        if key in held:
            held[key].refresh(new)
        return held.setdefault(key, new)

    def _plan(self, batch: AttentionBatch, width: int) -> TokenPlan:
        device = batch.slots.device
        table = torch.nn.functional.pad(batch.block_table, (0, width - batch.block_table.shape[1])).long()
        slots = (table[:, :, None] * self.block_size + torch.arange(self.block_size, device=device)).flatten(1)
        token = torch.arange(len(batch.slots), device=device)
        row = torch.searchsorted(batch.query_starts[1:].contiguous(), token.int(), right=True)
        behind_end = batch.query_starts[1:][row] - token
        position = (batch.context_lengths[row] - behind_end)[:, None]
        key = torch.arange(slots.shape[1], device=device)
        hidden = (key > position) | (key <= position - (self.spec.window or slots.shape[1]))
        return TokenPlan(slots[row], hidden, key - position)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: TokenPlan, layer: int) -> Tensor:
        shape = (*plan.slots.shape, self.spec.kv_heads, self.spec.head_size)
        keys, values = (held.view(shape).float() for held in self.layout.read(cache, layer, plan.slots.flatten()))
        values = values.masked_fill(plan.hidden[:, :, None, None], 0)
        grouped = query.float().reshape(len(query), self.spec.kv_heads, self.spec.group, self.spec.head_size)
        logits = torch.einsum("tkgd,tckd->tkgc", grouped, keys) * self.spec.scale
        if self.spec.softcap is not None:
            logits = (logits / self.spec.softcap).tanh() * self.spec.softcap
        if self.spec.alibi_slopes is not None:
            slopes = torch.tensor(self.spec.alibi_slopes, device=query.device).view(grouped.shape[1:3])
            logits = logits + slopes[..., None] * plan.distance[:, None, None]
        logits = logits.masked_fill(plan.hidden[:, None, None], -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks[layer].view(1, self.spec.kv_heads, self.spec.group, 1).expand(len(query), -1, -1, -1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = logits.softmax(dim=-1).nan_to_num()[..., : plan.slots.shape[1]]
        return torch.einsum("tkgc,tckd->tkgd", weights, values).flatten(1, 2).to(query.dtype)
