"""Linear layers as a device multiplies them fastest: projections of one input merged; on a CPU, weights reordered once.

On a GPU, a few rows have a product of their own (product.py).

oneDNN multiplies rows by a weight in its own blocked order about twice as fast as by one that lies row by row. A few
rows, what a few requests decode, wait for the memory that the weights come from; so they have a product of their own,
which reads half the bytes where all float32 weights of a layer are bfloat16 numbers, as most checkpoints' are
(product.cpp).
Projections that read the same input (query, key and value; gate and up) become one product: the first that is asked
computes all, the others hand out their part. None of it changes what is computed, beyond the order of its sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import native
from octavo.models import operators

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' models keep projections of one and the same input."""
_ROWS = 512
"""Rows that oneDNN is told to expect. Any number can come; this one's order is good for a few and for many."""


_OUTPUTS, _WORDS = 32, 16
"""Of a panel of weights, see product.cpp."""
_SOURCE = Path(__file__).with_name("product.cpp")


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a float32 weight [out, in] in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        bias = None if bias is None else bias.detach()
        self._product = _Product(packed, bias, FewRows.of(weight, bias))
        self._number = torch.tensor(operators.register(self._product))

    @property
    def nbytes(self) -> int:
        """Of the weight in each order that it is kept in, and of the bias."""
        product = self._product
        kept = (product.packed, product.bias, product.few.panels if product.few is not None else None)
        return sum(one.numel() * one.element_size() for one in kept if one is not None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if operators.is_capturing():
            product: Tensor = operators.linear(x, self._number, self.out_features)
            return product
        return self._product(x)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Product:
    packed: Tensor
    bias: Tensor | None
    few: FewRows | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.few is not None and 0 < x.numel() <= self.few.most * self.few.in_features:
            return self.few(x)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


@dataclass(frozen=True, slots=True, eq=False)
class FewRows:
    """x @ weight.T + bias for a few rows, from weights kept as bfloat16; made by `of`."""

    kernel: Any
    most: int
    """Rows up to which it is the faster product on this processor."""
    panels: Tensor
    """[panels, in, 16] int32: two weights each."""
    in_features: int
    out_features: int
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> FewRows | None:
        """None where a weight [out, in] float32 is no bfloat16 number, or no C++ compiler is at hand."""
        if native.fault(_SOURCE) is not None:
            return None
        library, (outputs, inputs) = _library(), weight.shape
        panels = torch.empty(-(-outputs // _OUTPUTS), inputs, _WORDS, dtype=torch.int32)
        if not library.pack(weight.data_ptr(), inputs, outputs, panels.data_ptr()):
            return None
        return cls(library.few_rows, library.most_rows(), panels, inputs, outputs, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.numel() // self.in_features
        self.kernel(x.data_ptr(), rows, self.panels.data_ptr(), self.in_features, self.out_features, out.data_ptr())
        if self.bias is not None:
            out += self.bias
        return out


@cache
def _library() -> Any:
    library, pointer, number = native.load(_SOURCE), ctypes.c_void_p, ctypes.c_int64
    library.few_rows.argtypes, library.few_rows.restype = (pointer, number, pointer, number, number, pointer), None
    library.most_rows.argtypes, library.most_rows.restype = (), number
    library.pack.argtypes, library.pack.restype = (pointer, number, number, pointer), number
    return library


class GPULinear(nn.Linear):
    """x @ weight.T + bias, a few rows by a kernel of our own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=_bias(linear) is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = operators.product(x, self.weight, self.bias)
        return out


class MergedLinear:
    """Several projections of one input as one product, kept until its last part is taken."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        biases = [bias.detach() for bias in (_bias(linear) for linear in linears) if bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        weight, bias = torch.cat([linear.weight.detach() for linear in linears]), torch.cat(biases) if biases else None
        self.linear = _fastest(_plain(weight, bias))
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
    """Merge projections of one input, and have each linear layer multiply as fast as we know; says how many changed.

    The own weights of merged and of packed ones are let go, but for one that an embedding shares: a CPU holds it twice.
    """
    replaced = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [getattr(parent, name, None) for name in names]
            if all(_mergeable(linear) for linear in linears) and _alike(linears):
                merged = MergedLinear(linears)  # type: ignore[arg-type]
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, index))
                replaced += len(names)
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (faster := _fastest(child)) is not child:
                setattr(parent, name, faster)
                replaced += 1
    return replaced


def _fastest(linear: nn.Linear) -> nn.Module:
    """As it is, where nothing is known to be faster."""
    if _packable(linear):
        return PackedLinear(linear.weight, linear.bias)
    return GPULinear(linear) if _has_product(linear) else linear


def _has_product(linear: nn.Linear) -> bool:
    hooked = linear._forward_hooks or linear._forward_pre_hooks  # somebody's, that a new layer would not have
    if type(linear) is not nn.Linear or hooked or linear.weight.device.type != "cuda" or find_spec("triton") is None:
        return False
    from octavo.models import product

    return product.fits(linear.weight)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, those of packed layers among them; what is shared counts once."""
    merged = {module.merged.linear for module in model.modules() if isinstance(module, MergedPart)}
    tensors = [*model.parameters(), *model.buffers(), *(tensor for linear in merged for tensor in linear.parameters())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    replaced = [module.merged.linear if isinstance(module, MergedPart) else module for module in model.modules()]
    packed = {linear: linear.nbytes for linear in replaced if isinstance(linear, PackedLinear)}
    return sum(storages.values()) + sum(packed.values())


def _mergeable(module: object) -> bool:
    """A plain linear layer: a subclass, or one of its weight (a quantized one, say), knows better how to multiply."""
    if type(module) is not nn.Linear or type(module.weight) not in (Tensor, nn.Parameter):
        return False
    return module.weight.device.type != "cpu" or _packable(module)


def _packable(module: object) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
    )


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _bias(linear: nn.Linear) -> Tensor | None:
    return linear.bias


def _alike(linears: Sequence[nn.Linear | None]) -> bool:
    kinds = {
        (linear.in_features, _bias(linear) is None, linear.weight.dtype, linear.weight.device)
        for linear in linears
        if linear is not None
    }
    return len(kinds) == 1
