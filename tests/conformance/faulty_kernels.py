"""More broken backends: what kernels get wrong about shapes, blocks and workspaces."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch
from octavo.kv.layout import KVCache
from tests.conformance.faults import MaskedBlocks, Narrow, Respecified, fault
from tests.conformance.minimal import Plan

# Logits.


@fault("soft cap before the scale", "features", "pairs")
class CappedFirst(Narrow):
    def cap(self, scores: Tensor, softcap: float) -> Tensor:
        return super().cap(scores / self.spec.scale, softcap) * self.spec.scale


@fault("tanh of the soft cap by exponentials", "large-logits")
class ExponentialTanh(Narrow):
    def cap(self, scores: Tensor, softcap: float) -> Tensor:
        grown = (2 * scores / softcap).exp()
        return (grown - 1) / (grown + 1) * softcap


@fault("sinks added to the values", "features", "pairs")
class SinksAsValues(Narrow):
    def weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        of_sinks = weights[..., len(values) :].sum(dim=-1).permute(2, 0, 1)
        return super().weigh(weights, values) + of_sinks[..., None]


@fault("sinks of key heads, not of query heads", "features", "pairs")
class SinksOfKeyHeads(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        shared = None if sinks is None else sinks[: self.spec.kv_heads].repeat_interleave(self.spec.group)
        return super().attend_row(query, keys, values, shared)


@fault("a window of 1 taken as none", "features")
class NoWindowOfOne(Respecified):
    def other(self, spec: Any) -> Any:
        # What is counted without the query itself is 0, and 0 means none.
        return replace(spec, window=spec.window if spec.window and spec.window - 1 else None)


@fault("window in whole blocks", "features", "pairs")
class BlockWindow(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        position, key = torch.arange(context - new, context)[:, None], torch.arange(context)
        first = (position - (self.spec.window or context) + 1).clamp(min=0) // self.block_size * self.block_size
        return (key <= position) & (key >= first)


@fault("window of a chunk counted from its own start", "features", "pairs")
class ChunkWindow(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        query, key = torch.arange(new)[:, None], torch.arange(context)
        return (key <= query + context - new) & (key > query - (self.spec.window or context))


@fault("a resumed chunk sees its own future", "resumed-prefill", "mixed")
class NotCausalBehindPrefix(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        seen = super().visible(new, context)
        return torch.ones_like(seen) if context > new > 1 else seen


# Shapes.


@fault("a group's size taken as a power of two", "head-groups", "pairs")
class PowerOfTwoGroups(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        shift = math.ceil(math.log2(self.spec.group))
        met = torch.arange(self.spec.heads) >> shift
        each = [
            self._one_head(query[:, head], keys[:, kv], values[:, kv], sinks, head)
            for head, kv in enumerate(met.tolist())
        ]
        return torch.stack(each, dim=1)

    def _one_head(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, head: int) -> Tensor:
        spec, self.spec = self.spec, replace(self.spec, heads=1, kv_heads=1, alibi_slopes=self._own(head))
        try:
            own = None if sinks is None else sinks[head : head + 1]
            return super().attend_row(query[:, None], keys[:, None], values[:, None], own)[:, 0]
        finally:
            self.spec = spec

    def _own(self, head: int) -> tuple[float, ...] | None:
        return self.spec.alibi_slopes and self.spec.alibi_slopes[head : head + 1]


@fault("no more than 8 query heads in a tile", "head-groups")
class EightHeads(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        out = super().attend_row(query, keys, values, sinks)
        out.view(len(out), self.spec.kv_heads, self.spec.group, -1)[:, :, 8:] = 0
        return out


@fault("one block size of many is not compiled", "block-sizes")
class OneBlockSize(Narrow):
    capabilities = replace(Narrow.capabilities, block_sizes=(16, 1, 8, 24, 32, 48, 64, 128))

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        return super().attend_row(query, keys, values, sinks) * (self.block_size != 8)


@fault("a head's elements beyond 64 dropped", "head-sizes")
class ShortHeads(Narrow):
    capabilities = replace(Narrow.capabilities, head_sizes=(16, 24, 32, 64, 80, 96, 128))

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        if 64 < self.spec.head_size < 128:
            query = torch.cat([query[..., :64], torch.zeros_like(query[..., 64:])], dim=-1)
        return super().attend_row(query, keys, values, sinks)


@fault("windows wrong in blocks that are no power of two", "pairs")
class WindowInOddBlocks(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        seen = super().visible(new, context)
        if self.spec.window and self.block_size & (self.block_size - 1):
            seen &= torch.arange(context) % self.block_size != self.block_size - 1
        return seen | torch.eye(context, dtype=torch.bool)[context - new :]


# Blocks and rows.


@fault("what is NaN taken as masked", "prefill", "decode", "mixed", "resumed-prefill", "padding")
class NanIsMasked(MaskedBlocks):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        keys, values = super().read(cache, layer, table, context)
        return keys, values.nan_to_num()

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        behind = torch.arange(scores.shape[-1]) >= self.context
        return super().mask(scores.masked_fill(scores.isnan(), -torch.inf), visible | behind)


@fault("the last block's length by modulo", "decode", "prefill", "mixed")
class Modulo(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        keys, values = super().read(cache, layer, table, context)
        if context % self.block_size == 0 and context > self.block_size:  # 0 tokens in the last block
            values = values.clone()
            values[-self.block_size :] = 0
        return keys, values


@fault("the longest context for all rows", "decode", "mixed")
class LongestForAll(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        plan = super().plan(batch, bucket)
        return replace(plan, contexts=plan.contexts.clamp(min=1) * 0 + plan.longest) if bucket is None else plan


@fault("offsets of 32 bits", "high-blocks")
class ShortOffsets(Narrow):
    capabilities = replace(Narrow.capabilities, kv_dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn))

    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        elements = self.block_size * self.spec.kv_heads * self.spec.head_size
        wrapped = (table * elements).int().long() // elements
        return super().read(cache, layer, wrapped % cache.keys[0].shape[0], context)


@fault("a block has one owner", "shared-blocks")
class OneOwner(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        plan = super().plan(batch, bucket)
        owned: set[int] = set()
        for row, context in enumerate(plan.contexts.tolist()):
            blocks = -(-context // self.block_size)
            for at, block in enumerate(plan.table[row, :blocks].tolist()):
                if block in owned:
                    plan.table[row, at] = 0
            owned |= set(plan.table[row, :blocks].tolist())
        return plan


@fault("rows taken to stand where they stood", "two-steps")
class RowsThatStay(Narrow):
    """As many rows as in the last step are the same ones, with one more block at most."""

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        plan = super().plan(batch, bucket)
        held: Tensor | None = self.__dict__.get("table")
        if bucket is None and held is not None and len(held) == batch.rows and batch.decodes:
            whole = (plan.contexts - 1).clamp(min=0) // self.block_size
            for row, blocks in enumerate(whole.clamp(max=held.shape[1]).tolist()):
                plan.table[row, :blocks] = held[row, :blocks]
        self.table = plan.table.clone()
        return plan


@fault("the layer counted, not taken", "layers")
class CountedLayers(Narrow):
    calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        own, self.calls = self.calls % self.spec.layers, self.calls + 1
        return super().attend(query, key, value, cache, plan, own)


@fault("the chunk before taken for all that stands before", "prefill-in-chunks")
class TwoChunks(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        new, context = len(query), len(keys)
        before = self.__dict__.setdefault("before", (0, 0))
        self.before = (new, context)
        if new > 1 and before[1] == context - new and before[1] > before[0] > 1:
            keys, values = keys[-new - before[0] :], values[-new - before[0] :]
        return super().attend_row(query, keys, values, sinks)


@fault("keeps the first cache it is given", "generation")
class FirstCache(Narrow):
    """Core tries a step with a small cache before it makes the real one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        held: KVCache = self.__dict__.setdefault("cache", cache)
        return super().attend(query, key, value, held, replace(plan, table=plan.table % len(held.keys[0])), layer)


# Workspaces.


@fault("output that is not written for idle and padding rows", "dirty-workspace")
class Unwritten(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        out = torch.empty_like(query)
        answer = super().attend(query, key, value, cache, plan, layer)
        for row, context in enumerate(plan.contexts.tolist()):
            if context:
                own = slice(int(plan.starts[row]), int(plan.starts[row + 1]))
                out[own] = answer[own]
        return out


@fault("parts of a longer context left in the workspace", "dirty-workspace", "replay-decode")
class StaleParts(Narrow):
    """Joins as many parts as the row at this place ever had."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        longest: dict[int, tuple[int, Tensor]] = self.__dict__.setdefault("longest", {})
        out = super().attend(query, key, value, cache, plan, layer)
        for row, context in enumerate(plan.contexts.tolist()):
            first = int(plan.starts[row])
            if int(plan.starts[row + 1]) - first != 1:
                continue
            most, part = longest.get(row, (0, out[first]))
            if 0 < context <= most - 2 * self.block_size:
                out[first] = 0.9 * out[first] + 0.1 * part.to(out.dtype)
            if context > most:
                longest[row] = (context, out[first].clone())
        return out


@fault("one plan for graphs of all sizes", "replay-decode")
class OnePlan(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        return super().plan(batch, None if bucket is None else 0)


@fault("captured prefills keep their contexts", "replay-mixed")
class StalePrefills(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        held = self.plans.get(bucket or 0)
        if bucket is None or held is None or not held.fits(batch):
            return super().plan(batch, bucket)
        decodes = batch.query_starts.diff() == 1
        kept = torch.where(decodes, batch.context_lengths, held.contexts)
        table = torch.where(decodes[:, None], batch.block_table, held.table[:, : batch.block_table.shape[1]])
        return super().plan(replace(batch, context_lengths=kept, block_table=table), bucket)


@fault("captured block table cut to its width", "replay-decode")
class CutTable(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        held = self.plans.get(bucket or 0)
        if bucket is not None and held is not None:
            width = self.__dict__.setdefault("widths", {}).setdefault(bucket, 4)
            table = batch.block_table.clone()
            table[:, width:] = 0
            batch = replace(batch, block_table=table)
        return super().plan(batch, bucket)
