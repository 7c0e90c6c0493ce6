"""The cache's layout: head-major, written and gathered in C++."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import native
from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import HEAD_MAJOR, AxesLayout, KVCache

SOURCE = Path(__file__).with_name("cache.cpp")


class Geometry(ctypes.Structure):
    """What the kernel calls Geometry."""

    _fields_ = (("heads", ctypes.c_int64), ("block_size", ctypes.c_int64), ("bytes", ctypes.c_int64))


@dataclass(frozen=True, eq=False)
class CPULayout(AxesLayout):
    """PyTorch's scatter and gather are several small operations a layer."""

    @classmethod
    def of(cls, spec: AttentionSpec, block_size: int) -> CPULayout:
        """The layout of one group of layers."""
        plain = HEAD_MAJOR(spec, block_size)
        return cls(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [tokens, kv_heads, head_size]; slots: [tokens] int64, -1 writes nothing."""
        key, value, slots = key.to(self.dtype), value.to(self.dtype), slots.contiguous()
        _kernel().write(
            self._geometry, *_strided(key), *_strided(value), slots.data_ptr(), len(slots),
            cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(),
        )  # fmt: skip

    def gather(self, cache: KVCache, layer: int, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """The first `context` tokens of blocks [n] int64, each [context, kv_heads, head_size], head-major."""
        key, value = torch.empty(2, self.kv_heads, context, self.head_size, dtype=self.dtype)
        _kernel().gather(
            self._geometry, cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), blocks.data_ptr(), context,
            key.data_ptr(), value.data_ptr(),
        )  # fmt: skip
        return key.transpose(0, 1), value.transpose(0, 1)

    @cached_property
    def _geometry(self) -> Any:
        return ctypes.pointer(Geometry(self.kv_heads, self.block_size, self.head_size * self.dtype.itemsize))


@cache
def _kernel() -> Any:
    """The library with its functions' types. Raises RuntimeError with the compiler's words."""
    library = native.load(SOURCE)
    geometry, pointer, number = ctypes.POINTER(Geometry), ctypes.c_void_p, ctypes.c_int64
    strided = (pointer, number, number)
    library.write.argtypes = (geometry, *strided, *strided, pointer, number, pointer, pointer)
    library.gather.argtypes = (geometry, *[pointer] * 3, number, pointer, pointer)
    library.write.restype = library.gather.restype = None
    return library


def _strided(tensor: Tensor) -> tuple[int, int, int]:
    """[tokens, heads, size] as the kernel takes it: where, from token to token, from head to head, in bytes."""
    tokens, heads, _ = tensor.stride()
    return tensor.data_ptr(), tokens * tensor.itemsize, heads * tensor.itemsize
