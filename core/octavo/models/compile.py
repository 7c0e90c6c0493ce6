"""The repeated decoder layer, compiled once: what one layer was compiled to serves all of them.

What the compiler must not look into (attention with its cache, weights in an order of their own) is an operator to it,
which finds its layer by a number. The number is a tensor: as a plain integer it would be part of the compiled code, and
each layer would be compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

Layer = Callable[..., Tensor]

_library = torch.library.Library("octavo", "DEF")
_library.define("attention(Tensor query, Tensor key, Tensor value, Tensor layer) -> Tensor")
_library.define("linear(Tensor x, Tensor layer, int out_features) -> Tensor")

_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()


def register(layer: Layer) -> Tensor:
    """A number for `layer`, int64 on the host, that holds as long as somebody else keeps the layer."""
    number = max(_layers, default=-1) + 1
    _layers[number] = layer
    return torch.tensor(number)


def _attention(query: Tensor, key: Tensor, value: Tensor, layer: Tensor) -> Tensor:
    return _layers[int(layer)](query, key, value)


def _linear(x: Tensor, layer: Tensor, out_features: int) -> Tensor:
    return _layers[int(layer)](x)


def _attention_shape(query: Tensor, key: Tensor, value: Tensor, layer: Tensor) -> Tensor:
    batch, heads, tokens, size = query.shape
    return query.new_empty(batch, tokens, heads, size)


def _linear_shape(x: Tensor, layer: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


for _name, _run, _shape in (("attention", _attention, _attention_shape), ("linear", _linear, _linear_shape)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _shape, lib=_library)


def compile_layers(model: nn.Module, attentions: Sequence[nn.Module]) -> int:
    """Compile the repeated layers that hold these attention modules, on their next call; says how many there are."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == len(attentions):
            held = [set(layer.modules()) for layer in stack]
            if all(attention in modules for attention, modules in zip(attentions, held, strict=True)):
                for layer in stack:
                    layer.compile(dynamic=True)
                return len(stack)
    return 0
