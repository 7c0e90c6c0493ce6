"""More broken backends: faults of rows and plans."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch
from octavo.kv.layout import KVCache
from tests.conformance.faults import Narrow, fault
from tests.conformance.minimal import Plan

# Rows and inputs.


@fault("rows of length 0 give NaN", "padding", "replay-decode")
class EmptySoftmax(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        out = super().attend(query, key, value, cache, plan, layer)
        for row, context in enumerate(plan.contexts.tolist()):
            if context == 0:
                out[plan.starts[row] : plan.starts[row + 1]] = float("nan")
        return out


@fault("every row has a query token", "idle-rows")
class NoIdleRows(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        plan = super().plan(batch, bucket)
        counts = plan.starts.diff().clamp(min=1)
        plan.starts[1:] = counts.cumsum(0)
        return plan


@fault("query read as contiguous", "strided-inputs")
class Contiguity(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        rows = torch.as_strided(query, query.shape, torch.empty(query.shape).stride(), query.storage_offset())
        return super().attend(rows, key, value, cache, plan, layer)


@fault("output in float32", "dtypes")
class WideOutput(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        return super().attend(query, key, value, cache, plan, layer).float()


@fault("unused slots cleaned in the cache", "decode", "prefill")
class Cleaning(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        cache.values[layer].nan_to_num_()
        return super().attend(query, key, value, cache, plan, layer)


@fault("not batch invariant", "batch-invariant")
class RowsMatter(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        return super().attend(query, key, value, cache, plan, layer) * (1 + 2e-7 * len(plan.contexts))


@fault("other bits in a chunk of several tokens", "batch-invariant")
class ChunksMatter(Narrow):
    def attend_tokens(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        several = len(query) > 1
        return super().attend_tokens(query, keys, values, sinks) * (1 + 2e-7 * several)


@fault("other bits at another place in a batch", "batch-invariant")
class PlacesMatter(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        out = super().attend(query, key, value, cache, plan, layer)
        return out * (1 + 2e-7 * (torch.arange(len(out)) % 3 == 2)[:, None, None])


# Plans.


@fault("plan kept from the first step", "two-steps", "block-sizes")
class FirstPlan(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        return self.plans.setdefault(0, super().plan(batch, bucket))


@fault("same plan, not refreshed", "replay-decode", "replay-mixed")
class StalePlan(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        if bucket in self.plans and self.plans[bucket].fits(batch):
            return self.plans[bucket]
        return super().plan(batch, bucket)


@fault("block table refreshed, lengths not", "replay-decode", "replay-mixed")
class StaleLengths(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        held = self.plans.get(bucket or 0)
        contexts = batch.context_lengths if held is None else held.contexts.clone()
        return super().plan(replace(batch, context_lengths=contexts), bucket)


@fault("plan holds core's tensors", "replay-decode", "replay-mixed")
class Borrowing(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        new = Plan(batch.query_starts, batch.context_lengths, batch.block_table, batch.max_context)
        return new if bucket is None else self.plans.setdefault(bucket, new)


@fault("plan refreshed by new tensors", "replay-decode", "replay-mixed")
class Rebinding(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        new = Plan.of(batch)
        held = self.plans.setdefault(bucket or 0, new) if bucket else new
        held.contexts, held.table = new.contexts, new.table
        return held


@fault("a host number of the capture baked in", "replay-decode")
class BakedNumber(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        known = replace(plan, contexts=plan.contexts.clamp(max=plan.longest))
        return super().attend(query, key, value, cache, known, layer)


@fault("graphs declared, a new plan each step", "replay-decode", "replay-mixed")
class NewPlans(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        return Plan.of(batch)


@fault("plan writes into core's tensors", "padding")
class Scribbling(Narrow):
    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        batch.context_lengths.clamp_(min=1)
        return super().plan(batch, bucket)
