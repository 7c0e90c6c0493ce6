"""Linear layers as a CPU multiplies them fastest: weights reordered once, projections of one input merged.

oneDNN multiplies a few rows by a weight in its own blocked order about twice as fast as by one that lies row by row.
Projections that read the same input (query, key and value; gate and up) become one product: the first that is asked
computes all, the others hand out their part. Neither changes what is computed, beyond the order of its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.models.compile import register

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' models keep projections of one and the same input."""
_ROWS = 512
"""Rows that oneDNN is told to expect. Any number can come; this one's order is good for a few and for many."""


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a float32 weight [out, in] in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._product = _Product(packed, None if bias is None else bias.detach())
        self._number = register(self._product)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if torch.compiler.is_compiling():
            product: Tensor = torch.ops.octavo.linear(x, self._number, self.out_features)
            return product
        return self._product(x)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Product:
    packed: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


class MergedLinear:
    """Several projections of one input as one product, kept until its last part is taken."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        biases = [bias.detach() for bias in (_bias(linear) for linear in linears) if bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.linear = PackedLinear(weight, torch.cat(biases) if biases else None)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._left = 0

    def part(self, index: int, x: Tensor) -> Tensor:
        """Projection `index` of x. Each part of an input is asked for once, in any order: then nothing is held."""
        if self._input is not x:
            self._input, self._parts = x, self.linear(x).split(self.sizes, dim=-1)
            self._left = len(self.sizes)
        part = self._parts[index]
        self._left -= 1
        if not self._left:
            self._input, self._parts = None, ()
        return part


class MergedPart(nn.Module):
    """Stands where one of the merged projections stood."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged, self.index = merged, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]: a view of the merged product."""
        return self.merged.part(self.index, x)


def pack(model: nn.Module) -> int:
    """Replace the linear layers of a float32 model on a CPU by packed ones; says how many.

    Their own weights are let go, but for one that an embedding shares: that one is held twice.
    """
    replaced = 0
    if not torch.backends.mkldnn.is_available():
        return replaced
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [getattr(parent, name, None) for name in names]
            if all(_packable(linear) for linear in linears) and _alike(linears):
                merged = MergedLinear(linears)  # type: ignore[arg-type]
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, index))
                replaced += len(names)
        for name, child in list(parent.named_children()):
            if _packable(child):
                setattr(parent, name, PackedLinear(child.weight, child.bias))  # type: ignore[arg-type]
                replaced += 1
    return replaced


def _packable(module: object) -> bool:
    """A plain linear layer: a subclass (a quantized one, say) knows better how to multiply."""
    return type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


def _bias(linear: nn.Linear) -> Tensor | None:
    return linear.bias


def _alike(linears: Sequence[nn.Linear | None]) -> bool:
    shapes = {(linear.in_features, _bias(linear) is None) for linear in linears if linear is not None}
    return len(shapes) == 1
