"""More broken backends: what kernels get wrong about linear position biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from tests.conformance.faults import Narrow, Respecified, fault


@fault("ALiBi slopes dropped", "features", "pairs")
class NoSlopes(Respecified):
    def other(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, alibi_slopes=None)


@fault("ALiBi slopes by a formula, not those that are given", "features", "pairs")
class UsualSlopes(Narrow):
    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        return super().bias([2 ** (-8 * (head + 1) / len(slopes)) for head in range(len(slopes))], new, context)


@fault("ALiBi slopes of key heads, not of query heads", "features", "pairs")
class SlopesOfKeyHeads(Narrow):
    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        of_key_heads = [slopes[head // self.spec.group] for head in range(self.spec.heads)]
        return super().bias(of_key_heads, new, context)


@fault("ALiBi favours distant keys", "features", "pairs")
class OtherSign(Narrow):
    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        return -super().bias(slopes, new, context)


@fault("ALiBi of a chunk counted from its own start", "features", "pairs")
class ChunkDistances(Narrow):
    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        """The plain causal triangle: as if the first query stood at the first key."""
        return super().bias(slopes, context, context)[:, :, :new].clamp(max=0)


@fault("ALiBi counted within blocks", "features", "pairs")
class BlockDistances(Narrow):
    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        return super().bias(slopes, new, context)[..., torch.arange(context) % self.block_size]


@fault("ALiBi before the soft cap", "features", "pairs")
class CappedBias(Narrow):
    def cap(self, scores: Tensor, softcap: float) -> Tensor:
        if self.spec.alibi_slopes is None:
            return super().cap(scores, softcap)
        bias = super().bias(self.spec.alibi_slopes, *scores.shape[2:])
        return super().cap(scores + bias, softcap)

    def bias(self, slopes: Sequence[float], new: int, context: int) -> Tensor:
        return super().bias(slopes, new, context) * (self.spec.softcap is None)
