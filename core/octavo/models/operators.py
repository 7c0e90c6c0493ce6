"""Attention and packed products as operators: what a capture of the model records instead of looking into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from weakref import ReferenceType, ref

import torch
from torch import Tensor

Layer = Callable[..., Tensor]

_library = torch.library.Library("octavo", "DEF")
_library.define("attention(Tensor query, Tensor key, Tensor value, int layer) -> Tensor")
_library.define("linear(Tensor x, Tensor layer, int out_features) -> Tensor")
_library.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

_layers: dict[int, ReferenceType[Layer]] = {}
_numbers = count()
_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def register(layer: Layer) -> int:
    """A number for `layer`, which holds as long as somebody else keeps the layer."""
    number = next(_numbers)
    _layers[number] = ref(layer, lambda _: _layers.pop(number))
    return number


def registered(number: int) -> Layer:
    """The layer of a number. Raises KeyError once it is gone."""
    layer = _layers[number]()
    if layer is None:
        raise KeyError(number)
    return layer


@contextmanager
def capturing() -> Iterator[None]:
    """Within, layers call their operators."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Should a layer call its operator, so that the operator is recorded?"""
    return _capturing.get()


def _attention(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    return registered(layer)(query, key, value)


def _linear(x: Tensor, layer: Tensor, out_features: int) -> Tensor:
    return registered(int(layer))(x)


def _attention_shape(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    return query.new_empty(query.shape)


def _linear_shape(x: Tensor, layer: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from octavo.models.product import product

    return product(x, weight, bias)


def _product_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


for _name, _run, _shape in (
    ("attention", _attention, _attention_shape),
    ("linear", _linear, _linear_shape),
    ("product", _product, _product_shape),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _shape, lib=_library)

attention = torch.ops.octavo.attention.default
"""[tokens, heads, size], two of [tokens, kv_heads, size], a layer's number -> [tokens, heads, size]."""
linear = torch.ops.octavo.linear.default
"""[..., in], a product's number as an int64 tensor, out -> [..., out].

The number is a tensor: as a plain integer it would be part of the compiled code, and each layer be compiled anew.
"""
product = torch.ops.octavo.product.default
"""[..., in], weight [out, in], bias [out] or None -> [..., out], by `octavo.models.product`."""
