"""The minimal backend broken on purpose, each time by one known fault, and the cases that must notice.

The faults are those that users of serving engines have reported: wrong indices, masks and head groups, unused slots
that leak, padding that writes, plans that go stale, features that are declared and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import Device
from octavo.kv.layout import KVCache
from tests.conformance.minimal import MinimalBackend, Plan

Broken = type[MinimalBackend]
FAULTS: dict[str, tuple[Broken, frozenset[str]]] = {}
"""What is broken -> the backend, and cases each of which must fail."""


def fault(name: str, *caught_by: str) -> Callable[[Broken], Broken]:
    """Register a broken backend."""

    def register(broken: Broken) -> Broken:
        FAULTS[name] = (broken, frozenset(caught_by))
        return broken

    return register


class Narrow(MinimalBackend):
    """Correct, and declares less, so that a run is short."""

    capabilities = replace(
        MinimalBackend.capabilities,
        dtypes=(torch.float32, torch.bfloat16),
        kv_dtypes=(torch.float32, torch.bfloat16),
        head_sizes=(16, 24),
        block_sizes=(16, 1, 24),
    )


# Which keys and values are read.


@fault("blocks taken as contiguous", "decode", "prefill", "resumed-prefill", "shared-blocks")
class Contiguous(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        return super().read(cache, layer, table[0] + torch.arange(len(table)), context)


@fault("block numbers cut to 16 bits", "high-blocks")
class ShortNumbers(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        return super().read(cache, layer, table.short().long(), context)


@fault("block numbers cut to 8 bits", "high-blocks")
class TinyNumbers(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        return super().read(cache, layer, table.to(torch.int8).long(), context)


@fault("block table of row 0 for all rows", "decode", "mixed", "shared-blocks", "batch-invariant")
class RowZero(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        table = plan.table[:1].expand(plan.table.shape)
        return super().attend(query, key, value, cache, replace(plan, table=table), layer)


@fault("every layer reads layer 0", "layers", "decode", "prefill")
class LayerZero(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        return super().read(cache, 0, table, context)


@fault("last block read to its end", "decode", "prefill", "zero-query")
class WholeBlocks(Narrow):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        return super().read(cache, layer, table, -(-context // self.block_size) * self.block_size)

    def visible(self, new: int, context: int) -> Tensor:
        return torch.ones(new, context, dtype=torch.bool)


class MaskedBlocks(Narrow):
    """Correct but for what a mask does not hide: whole blocks are read."""

    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        self.context = context
        return super().read(cache, layer, table, -(-context // self.block_size) * self.block_size)

    def visible(self, new: int, context: int) -> Tensor:
        seen = super().visible(new, self.context)
        return torch.nn.functional.pad(seen, (0, context - self.context))

    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        return torch.nn.functional.pad(super().bias(slopes, new, self.context), (0, context - self.context))


@fault("weight 0 times NaN value", "decode", "prefill", "padding")
class ZeroTimesNan(MaskedBlocks):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        keys, values = super().read(cache, layer, table, context)
        return keys.nan_to_num(), values


@fault("mask added to NaN key", "decode", "prefill", "padding")
class AddedMask(MaskedBlocks):
    def read(self, cache: KVCache, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        keys, values = super().read(cache, layer, table, context)
        return keys, values.nan_to_num()

    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores + torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))


@fault("prefix ignored in prefill", "resumed-prefill", "prefill-in-chunks", "mixed", "shared-blocks")
class NoPrefix(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        new = query.shape[0]
        return super().attend_row(query, keys[-new:] if new > 1 else keys, values[-new:] if new > 1 else values, sinks)


@fault("this step's keys instead of the cache's on resumed rows", "resumed-prefill", "prefill-in-chunks")
class OwnKeys(Narrow):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        out = super().attend(query, key, value, cache, plan, layer)
        starts = plan.starts.tolist()
        sinks = None if self.sinks is None else self.sinks[layer]
        for start, end in pairwise(starts):
            if end - start > 1:
                own = slice(start, end)
                out[own] = self.attend_row(query[own].float(), key[own].float(), value[own].float(), sinks)
        return out


# Which of them count, and how much.


@fault("causal mask from the top left", "decode", "resumed-prefill")
class TopLeft(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        return torch.ones(new, context, dtype=torch.bool).tril()


@fault("window one too wide", "features")
class WideWindow(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        distance = torch.arange(context - new, context)[:, None] - torch.arange(context)
        return (distance >= 0) & (distance <= (self.spec.window or context))


@fault("window counted from the last query", "features")
class LastWindow(Narrow):
    def visible(self, new: int, context: int) -> Tensor:
        near = torch.arange(context) >= context - (self.spec.window or context)
        return near & (torch.arange(context) <= torch.arange(context - new, context)[:, None])


@fault("masked by a large number", "large-logits")
class Sentinel(Narrow):
    def mask(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -5e4)


@fault("softmax without its maximum", "large-logits")
class Overflowing(Narrow):
    def softmax(self, scores: Tensor) -> Tensor:
        return scores.exp() / scores.exp().sum(dim=-1, keepdim=True)


@fault("a logit of 0 taken as masked", "zero-query")
class ZeroIsMasked(Narrow):
    def softmax(self, scores: Tensor) -> Tensor:
        return super().softmax(scores.masked_fill(scores == 0, float("-inf")))


@fault("wrong head group", "head-groups", "decode")
class WrongGroup(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        order = torch.arange(self.spec.heads).view(self.spec.group, self.spec.kv_heads).T.flatten()
        return super().attend_row(query[:, order], keys, values, sinks)[:, order.argsort()]


class Respecified(Narrow):
    """Computes for another spec than it was given."""

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(spec, block_size, device, options, sinks)
        self.spec = self.other(spec)

    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return spec


@fault("soft cap dropped", "features")
class NoSoftcap(Respecified):
    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, softcap=None)


@fault("window declared and ignored", "features")
class NoWindow(Respecified):
    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=None)


@fault("scale dropped", "decode", "prefill")
class NoScale(Respecified):
    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, scale=1.0)


@fault("scale assumed to be head_size ** -0.5", "decode", "prefill", "head-sizes")
class UsualScale(Respecified):
    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, scale=spec.head_size**-0.5)


@fault("sinks dropped", "features")
class NoSinks(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        return super().attend_row(query, keys, values, None)


@fault("sinks of layer 0 in every layer", "features")
class FirstSinks(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        return super().attend_row(query, keys, values, None if self.sinks is None else self.sinks[0])


@fault("feature over-claimed", "features")
class Raising(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        if self.spec.features == {"window", "softcap", "sinks", "alibi"}:
            raise RuntimeError("no kernel for this combination")
        return super().attend_row(query, keys, values, sinks)


@fault("accumulates in the dtype of its input", "dtypes")
class LowPrecision(Narrow):
    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        query, keys, values = (part.to(self.spec.dtype) for part in (query, keys, values))
        return super().attend_row(query, keys, values, None if sinks is None else sinks.to(self.spec.dtype))
