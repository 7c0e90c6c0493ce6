"""Attention in pure PyTorch: rows that decode in one batched product over viewed blocks, the others row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import HEAD_MAJOR, Axes, AxesLayout, KVCache, LayoutType
from octavo_reference.decode import DecodePlan, decode
from octavo_reference.each import EachPlan, apart

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One row with more than one query token, or an idle one."""

    start: int
    """Its first query token in the packed batch."""
    length: int
    context: int
    blocks: Tensor
    """[blocks] int64: the blocks of its context."""
    mask: Tensor | None
    """[length, context] bool, True where a query sees a key; None: plain causal from the first key."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the rows that decode, together, and the others one by one."""

    decode: Any
    prefills: tuple[Prefill, ...]


class ReferenceBackend(AttentionBackend):
    """Runs wherever PyTorch does, reads any layout of named axes through its logical view, accumulates in float32."""

    name = "reference"
    platform = "any"
    contract = 1
    priority = 0
    capabilities = Capabilities(
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS,
        head_sizes=(...,),
        block_sizes=(32, ...),
        features=frozenset({"window", "softcap", "sinks", "alibi"}),
        prefix_caching=True,
        batch_invariant=True,
    )
    layout_type: ClassVar[LayoutType] = HEAD_MAJOR

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Takes the option `layout`: key axes, or [key axes, value axes], e.g. "block slot head dim"."""
        options = dict(options or {})
        axes = options.pop("layout", None)
        super().__init__(spec, block_size, device, options, sinks)
        slopes = spec.alibi_slopes
        self._slopes: Tensor | None = None
        if slopes is not None:
            self._slopes = torch.tensor(slopes, dtype=torch.float32, device=device.torch_device)[:, None, None]
        if axes is not None:
            self.layout = Axes(*([axes] if isinstance(axes, str) else axes))(spec, block_size)

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Read the step's lengths and tables on the host, once for all layers."""
        if self.spec.batch_invariant:
            batch = apart(batch)
        contexts = batch.context_lengths.tolist()
        starts = batch.query_starts.tolist()
        prefills = tuple(
            self._prefill(starts[row], starts[row + 1] - starts[row], contexts[row], batch.block_table[row])
            for row in range(batch.decodes, len(contexts))
            if starts[row + 1] > starts[row]
        )
        return Plan(self.plan_decode(batch, contexts[: batch.decodes]), prefills)

    def plan_decode(self, batch: AttentionBatch, contexts: list[int]) -> Any:
        """For the rows that decode, of these context lengths; None without such rows."""
        if not contexts:
            return None
        if self.spec.batch_invariant:
            return EachPlan.build(self.spec, self.block_size, batch.block_table, contexts)
        return DecodePlan.build(self.spec, self.block_size, batch.block_table[: len(contexts)], contexts)

    def attend_decode(self, query: Tensor, cache: KVCache, plan: Any, layer: int) -> Tensor:
        """query [rows that decode, heads, head_size] -> the same shape."""
        layout, sinks = cast(AxesLayout, self.layout), None if self.sinks is None else self.sinks[layer]
        if isinstance(plan, EachPlan):
            return plan.attend(query, layout, cache, layer, partial(self._attend_row, mask=None, sinks=sinks))
        return decode(self.spec, layout, cache, layer, query, plan, sinks)

    def _prefill(self, start: int, length: int, context: int, table: Tensor) -> Prefill:
        blocks = table[: -(-context // self.block_size)].long()
        window = self.spec.window
        if context == length and (window is None or window >= context):
            return Prefill(start, length, context, blocks, None)
        query = torch.arange(context - length, context, device=table.device)[:, None]
        key = torch.arange(context, device=table.device)[None]
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        return Prefill(start, length, context, blocks, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """[tokens, heads, head_size]; rows of padding come out as zeros."""
        if plan.decode is not None and not plan.prefills and plan.decode.rows == len(query):
            return self.attend_decode(query, cache, plan.decode, layer)
        out = query.new_zeros(query.shape)
        if plan.decode is not None:
            rows = plan.decode.rows
            out[:rows] = self.attend_decode(query[:rows], cache, plan.decode, layer)
        for row in plan.prefills:
            own = slice(row.start, row.start + row.length)
            out[own] = self.attend_prefill(query[own], key[own], value[own], cache, row, layer)
        return out

    def attend_prefill(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, row: Prefill, layer: int
    ) -> Tensor:
        """One row's own tokens: query [length, heads, head_size] -> the same shape."""
        if row.context != row.length:
            key, value = self.read_context(cache, row, layer)
        sinks = None if self.sinks is None else self.sinks[layer]
        return self._attend_row(query, key.to(query.dtype), value.to(query.dtype), row.mask, sinks)

    def read_context(self, cache: KVCache, row: Prefill, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values that a row sees, each [context, kv_heads, head_size]."""
        held = cast(AxesLayout, self.layout).read_blocks(cache, layer, row.blocks)
        key, value = (blocks.flatten(0, 1)[: row.context] for blocks in held)
        return key, value

    def _attend_row(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """One row: query [length, heads, size], key and value [context, kv_heads, size] -> [length, heads, size].

        mask: None where the context is as long as the query, or the query is one token that sees all of it.
        """
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        if self.spec.softcap is None and sinks is None and self._slopes is None:
            # Each key head is a sequence, whose query heads share it: enable_gqa would copy keys on a CPU.
            heads = (self.spec.kv_heads, self.spec.group)
            key, value = (part[:, None].expand(-1, self.spec.group, -1, -1) for part in (key, value))
            return (
                functional.scaled_dot_product_attention(
                    query.unflatten(0, heads),
                    key,
                    value,
                    mask,
                    is_causal=mask is None and query.shape[1] > 1,
                    scale=self.spec.scale,
                )
                .flatten(0, 1)
                .transpose(0, 1)
            )
        length, context = query.shape[1], key.shape[1]
        if mask is None:
            mask = torch.ones(length, context, dtype=torch.bool, device=query.device).tril(context - length)
        grouped = query.float().reshape(self.spec.kv_heads, -1, self.spec.head_size) * self.spec.scale
        scores = (grouped @ key.float().transpose(1, 2)).view(self.spec.heads, length, context)
        if self.spec.softcap is not None:
            scores = self.spec.softcap * torch.tanh(scores / self.spec.softcap)
        if self._slopes is not None:
            seen_from = torch.arange(context - length, context, device=query.device)[:, None]
            scores += self._slopes * (torch.arange(context, device=query.device) - seen_from)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, length, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :context].reshape(self.spec.kv_heads, -1, context)
        out = (weights @ value.float()).view(self.spec.heads, length, -1)
        return out.transpose(0, 1).to(query.dtype)
