"""How keys and values lie in a block: the only code that knows strides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec


class LayoutType(Protocol):
    """Makes layouts, e.g. an `Axes`."""

    def __call__(self, spec: AttentionSpec, block_size: int) -> KVCacheLayout:
        """The layout of one group of layers, `block_size` tokens a block."""


VECTOR_BYTES = 16
"""The width of one vector load: the packed axis x of a layout that splits another axis holds this many bytes."""


class KVCacheLayout(ABC):
    """Shapes, gather and scatter of the cache of one group of layers. The cache itself is opaque to everyone else."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers of the group."""

    @abstractmethod
    def allocate(self, num_blocks: int, device: torch.device) -> Any:
        """Room for `num_blocks` blocks, block 0 among them. What it holds at first is undefined."""

    @abstractmethod
    def write(self, cache: Any, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put key, value [tokens, kv_heads, head_size] at slots [tokens] int64; slot -1 changes nothing."""

    @abstractmethod
    def read(self, cache: Any, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [tokens] int64, each [tokens, kv_heads, head_size], copies."""

    @abstractmethod
    def copy_blocks(self, cache: Any, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, all layers; sources, targets: [n] int64. All are read before any is written."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of each layer of a group, in the shapes of an `AxesLayout`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


AxisStrides = tuple[int, int, int]
"""Of an axis in elements: coordinate a is at `a // packed * outer + a % packed * inner`; not split, at `a * inner`.

Outer stride, packed size, inner stride; the first two are 0 where the axis is not split.
"""
Strides = tuple[int, AxisStrides, AxisStrides, AxisStrides]
"""How a kernel finds an element: the stride of blocks, then the axes slot, head and dim."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A layout by the names of its axes, outermost first: `block`, `slot`, `head`, `dim` in any order.

    One axis may be split, its inner part packed elsewhere: "block head dim/x slot x" keeps x = 16 bytes of a head's
    elements together. `value` is as `key` unless given. It is a `LayoutType`: call it with a spec and block size.
    """

    key: str
    value: str | None = None

    def __call__(self, spec: AttentionSpec, block_size: int) -> AxesLayout:
        """The layout for one group of layers. Raises ValueError, with the axis at fault, on axes that make no sense."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        sizes = {"slot": block_size, "head": spec.kv_heads, "dim": spec.head_size}
        pack = max(1, VECTOR_BYTES // spec.kv_dtype.itemsize)
        key = _Order.parse(self.key, sizes, pack)
        value = key if self.value is None else _Order.parse(self.value, sizes, pack)
        return AxesLayout(spec.layers, block_size, spec.kv_dtype, key, value)


TOKEN_MAJOR = Axes("block slot head dim")
"""A token's heads together: flash-attention's and FlashInfer's NHD."""
HEAD_MAJOR = Axes("block head slot dim")
"""A head's tokens together: FlashInfer's HND, and what matrix products on a CPU like."""
PACKED = Axes("block head dim/x slot x", "block head dim slot")
"""The layout of the first PagedAttention kernels (arXiv 2309.06180)."""


@dataclass(frozen=True, slots=True)
class _Order:
    """One tensor's axes: shape without the block axis, and how to see it as [block, slot, head, dim]."""

    shape: tuple[int, ...]
    block: int
    """Where the block axis stands."""
    logical: tuple[int, ...]
    """Permutation to block, slot, head, dim, a split axis followed by its packed part."""
    parts: tuple[tuple[int, ...], ...]
    """Sizes of slot, head and dim, each one number, or two where split."""

    @classmethod
    def parse(cls, axes: str, sizes: dict[str, int], pack: int) -> _Order:
        names = axes.split()
        packed = [name.removesuffix("/x") for name in names if name.endswith("/x")]
        bare = [name.removesuffix("/x") for name in names if name != "x"]
        _check(axes, bare, packed, names.count("x"))
        if packed and sizes[packed[0]] % pack:
            raise ValueError(f'axis {packed[0]}/x of "{axes}": {sizes[packed[0]]} is not a multiple of x = {pack}')
        extent = {name: (sizes[name] // pack, pack) if name in packed else (sizes[name],) for name in sizes}
        plain = {"x": pack, "block": 0} | {name: parts[0] for name, parts in extent.items()}
        logical = [_position(names, "block")]
        for name in ("slot", "head", "dim"):
            logical += [_position(names, name)] + ([names.index("x")] if name in packed else [])
        shape = tuple(plain[name.removesuffix("/x")] for name in names)
        return cls(shape, logical[0], tuple(logical), tuple(extent[name] for name in ("slot", "head", "dim")))

    def allocate(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = (*self.shape[: self.block], num_blocks, *self.shape[self.block + 1 :])
        return torch.empty(shape, dtype=dtype, device=device)

    def view(self, tensor: Tensor) -> Tensor:
        """[block, slot, head, dim], a split axis as two: a view."""
        return tensor.permute(self.logical)

    def index(self, slots: Tensor) -> tuple[Tensor, ...]:
        """What indexes `view` so that [tokens, head, dim] comes out, a split head or dim as two."""
        (slot_parts, _, _), block_size = self.parts, math.prod(self.parts[0])
        block, offset = slots // block_size, slots % block_size
        return (block, offset) if len(slot_parts) == 1 else (block, offset // slot_parts[1], offset % slot_parts[1])

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token's heads as `view` has them."""
        return (*self.parts[1], *self.parts[2])

    def strides(self, tensor: Tensor) -> Strides:
        """Of `tensor`, which has this order."""
        block, *others = self.view(tensor).stride()

        def axis(parts: tuple[int, ...]) -> AxisStrides:
            return (others.pop(0), parts[1], others.pop(0)) if len(parts) > 1 else (0, 0, others.pop(0))

        slot, head, dim = map(axis, self.parts)
        return block, slot, head, dim


def _position(names: list[str], name: str) -> int:
    """Where an axis stands, split or not."""
    return names.index(name) if name in names else names.index(f"{name}/x")


def _check(axes: str, bare: list[str], packed: list[str], inner: int) -> None:
    for name in bare:
        if name not in ("block", "slot", "head", "dim"):
            raise ValueError(f'axis {name} of "{axes}" is not one of block, slot, head, dim, or the packed part x')
        if bare.count(name) > 1:
            raise ValueError(f'axis {name} stands {bare.count(name)} times in "{axes}"')
    for name in ("block", "slot", "head", "dim"):
        if name not in bare:
            raise ValueError(f'axis {name} is missing in "{axes}"')
    if "block" in packed:
        raise ValueError(f'axis block/x of "{axes}": blocks cannot be packed, their number is not fixed')
    if len(packed) > 1:
        raise ValueError(f'axis {packed[1]}/x of "{axes}": only one axis can be split, {packed[0]} is already')
    if len(packed) != inner:
        at_fault = f"{packed[0]}/x has no x that holds its packed part" if packed else "x has no axis that it splits"
        raise ValueError(f'axis {at_fault} in "{axes}"' if inner <= 1 else f'axis x stands {inner} times in "{axes}"')


@dataclass(frozen=True, slots=True, eq=False)
class AxesLayout(KVCacheLayout):
    """A layout whose every operation follows from the order of its axes. Equal layouts are interchangeable."""

    layers: int
    block_size: int
    dtype: torch.dtype
    key_order: _Order
    value_order: _Order

    def __eq__(self, other: object) -> bool:
        """Do both put every element in the same place? How fast they write it is their own affair."""
        return isinstance(other, AxesLayout) and self._places() == other._places()

    def __hash__(self) -> int:
        return hash(self._places())

    def _places(self) -> tuple[Any, ...]:
        return self.layers, self.block_size, self.dtype, self.key_order, self.value_order

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return math.prod(self.key_order.parts[1])

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return math.prod(self.key_order.parts[2])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers of the group."""
        elements = sum(math.prod(map(math.prod, order.parts)) for order in (self.key_order, self.value_order))
        return self.layers * elements * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """Undefined contents, as a cache has once blocks are used again."""
        keys = tuple(self.key_order.allocate(num_blocks, self.dtype, device) for _ in range(self.layers))
        values = tuple(self.value_order.allocate(num_blocks, self.dtype, device) for _ in range(self.layers))
        return KVCache(keys, values)

    def key_view(self, cache: KVCache, layer: int) -> Tensor:
        """Keys as [block, slot, head, dim], a split axis as two: a view, never a copy."""
        return self.key_order.view(cache.keys[layer])

    def value_view(self, cache: KVCache, layer: int) -> Tensor:
        """Values as [block, slot, head, dim], a split axis as two: a view, never a copy."""
        return self.value_order.view(cache.values[layer])

    def strides(self, cache: KVCache, layer: int) -> tuple[Strides, Strides]:
        """Of keys and of values, for kernels that read or write the cache themselves."""
        return self.key_order.strides(cache.keys[layer]), self.value_order.strides(cache.values[layer])

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Scatter. Slot -1 rewrites what slot 0 of the scratch block holds: no device is asked to filter rows."""
        # On a CPU to ask is cheaper than to rewrite.
        padded = not slots.is_cpu or bool((slots < 0).any())
        keep, slots = slots >= 0, slots.clamp(min=0) if padded else slots
        key_index = self.key_order.index(slots)
        value_index = key_index if self.value_order == self.key_order else self.value_order.index(slots)
        for order, tensor, new, index in (
            (self.key_order, cache.keys[layer], key, key_index),
            (self.value_order, cache.values[layer], value, value_index),
        ):
            view = _indexed(order.view(tensor))
            rows = _indexed(new.reshape(-1, *order.token_shape).to(self.dtype))
            if padded:
                rows = torch.where(keep.view(-1, *[1] * len(order.token_shape)), rows, view[index])
            view[index] = rows

    def read(self, cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather: each [tokens, kv_heads, head_size], copies."""
        shape = (-1, self.kv_heads, self.head_size)
        key = _indexed(self.key_view(cache, layer))[self.key_order.index(slots)].reshape(shape)
        value = _indexed(self.value_view(cache, layer))[self.value_order.index(slots)].reshape(shape)
        return key.view(self.dtype), value.view(self.dtype)

    def read_blocks(self, cache: KVCache, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Whole blocks [n] int64, each [n, block_size, kv_heads, head_size], copies."""
        shape = (-1, self.block_size, self.kv_heads, self.head_size)
        key, value = (_indexed(view(cache, layer))[blocks].reshape(shape) for view in (self.key_view, self.value_view))
        return key.view(self.dtype), value.view(self.dtype)

    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, all layers; sources, targets: [n] int64."""
        for order, tensors in ((self.key_order, cache.keys), (self.value_order, cache.values)):
            for tensor in tensors:
                blocks = _indexed(tensor.movedim(order.block, 0))
                blocks[targets] = blocks[sources]


def _indexed(tensor: Tensor) -> Tensor:
    """What can be indexed: PyTorch 2.8 does not know how on a CPU with float8, whose bytes are moved in its place."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def translate(
    source: KVCacheLayout,
    held: Any,
    target: KVCacheLayout,
    wanted: Any,
    layers: int,
    slots: Tensor,
    targets: Tensor | None = None,
) -> None:
    """Carry what slots [n] int64 hold from a cache in one layout to `targets` [n] of a cache in another.

    Any two layouts of as many heads of one size: blocks may be of other sizes, and elements are rounded where the
    target's dtype is smaller. Without `targets` to the same slots. A target of -1 takes nothing; no other slot changes.
    """
    for layer in range(layers):
        target.write(wanted, layer, *source.read(held, layer, slots), slots if targets is None else targets)
