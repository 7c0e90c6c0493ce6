"""More broken backends: faults of rows, plans, layouts and declarations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec, Capabilities
from octavo.kv.layout import TOKEN_MAJOR, AxesLayout, KVCache, LayoutType
from tests.conformance.faults import FAULTS, Narrow, fault
from tests.conformance.minimal import Plan

__all__ = ["FAULTS"]

# Rows and inputs.


@fault("rows of length 0 give NaN", "padding", "only-padding", "replay-decode")
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


# Layouts.


class WrappingLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        last = cache.keys[layer].shape[0] * self.block_size - 1
        super().write(cache, layer, key, value, torch.where(slots < 0, last, slots))


class SequentialLayout(AxesLayout):
    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        for source, target in zip(sources[:, None], targets[:, None], strict=True):
            super().copy_blocks(cache, source, target)


class KeysOnlyLayout(AxesLayout):
    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        super().copy_blocks(KVCache(cache.keys, ()), sources, targets)


class ContiguousLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        rows = torch.as_strided(key, key.shape, torch.empty(key.shape).stride(), key.storage_offset())
        super().write(cache, layer, rows, value, slots)


class OneLayerLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        for one in range(self.layers):
            super().write(cache, one, key, value, slots)


class SmallerFloatsLayout(AxesLayout):
    """Cuts at what another kind of fp8 (e4m3fnuz) ends at."""

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        super().write(cache, layer, key.clamp(-240, 240), value.clamp(-240, 240), slots)


class SwappedLayout(AxesLayout):
    """Reads heads and elements the other way round, which has the same shape where they are as many."""

    def read(self, cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().read(cache, layer, slots)
        return key.transpose(1, 2).reshape(key.shape), value


def made(layout: type[AxesLayout]) -> LayoutType:
    """Token-major, as `layout`."""

    def make(spec: AttentionSpec, block_size: int) -> AxesLayout:
        plain = TOKEN_MAJOR(spec, block_size)
        return layout(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)

    return make


@fault("slot -1 wraps around", "padding", "layout-write", "layout-blocks")
class Wrapping(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(WrappingLayout))


@fault("blocks copied one after another", "layout-blocks")
class Sequential(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(SequentialLayout))


@fault("only keys copied", "layout-blocks")
class KeysOnly(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(KeysOnlyLayout))


@fault("keys written as contiguous", "strided-inputs")
class ContiguousKeys(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(ContiguousLayout))


@fault("writing one layer writes all", "layout-write", "prefill")
class OneLayer(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(OneLayerLayout))


@fault("heads and elements swapped in read", "layout-write", "layout-blocks", "decode")
class Swapped(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(SwappedLayout))


@fault("fp8 cut below its largest number", "fp8-scales")
class SmallerFloats(Narrow):
    capabilities = replace(Narrow.capabilities, kv_dtypes=(torch.float8_e4m3fn,))
    layout_type: ClassVar[LayoutType] = staticmethod(made(SmallerFloatsLayout))


# Declarations.


@fault("written for another contract", "declaration")
class OldContract(Narrow):
    contract = 0


@fault("block sizes declared that its layout refuses", "block-sizes", "layout-blocks")
class OverClaimed(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(
        lambda spec, block_size: TOKEN_MAJOR(spec, block_size if block_size > 1 else 0)
    )


class Permissive(Capabilities):
    def refusals(self, spec: AttentionSpec, block_size: int | None) -> list[str]:
        return []


@fault("refuses nothing", "undeclared-is-refused")
class Yes(Narrow):
    capabilities = Permissive(
        **{
            name: getattr(Narrow.capabilities, name) for name in Capabilities.__dataclass_fields__ if name != "features"
        },
        features=frozenset({"window"}),
    )


@fault("unknown options swallowed", "unknown-option")
class Swallowing(Narrow):
    def __init__(
        self, spec: AttentionSpec, block_size: int, device: Any, options: Any = None, sinks: Tensor | None = None
    ) -> None:
        super().__init__(spec, block_size, device, None, sinks)
