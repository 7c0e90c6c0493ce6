"""Caches that the library writes, each in the order of axes that one of its builds reads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import HEAD_MAJOR, TOKEN_MAJOR, Axes, AxesLayout, KVCache
from octavo_ipex import library

FP8: Final = torch.float8_e5m2
"""The one dtype of a byte that the library knows on CPUs."""
_MOST: Final = 2**31
"""It counts slots, and on Intel's GPUs elements, in 32 bits."""


def word(kv_dtype: torch.dtype) -> str:
    """The library's name for a cache of this dtype."""
    return "fp8_e5m2" if kv_dtype == FP8 else "auto"


@dataclass(frozen=True, slots=True, eq=False)
class IPEXLayout(AxesLayout):
    """Axes in an order of the library's, and its operator that writes there."""

    axes: ClassVar[Axes]

    @classmethod
    def of(cls, spec: AttentionSpec, block_size: int) -> Self:
        """The layout of one group of layers."""
        plain = cls.axes(spec, block_size)
        return cls(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [tokens, kv_heads, head_size]; slots: [tokens] int64, -1 writes nothing.

        Raises ValueError for another number of slots than of keys and values.
        """
        if not len(slots) == len(key) == len(value):
            raise ValueError(f"{len(key)} keys and {len(value)} values are for as many slots, not for {len(slots)}")
        if len(slots):
            self._store(key, value, cache.keys[layer], cache.values[layer], slots)

    @abstractmethod
    def _store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """At least one token."""


class CPULayout(IPEXLayout):
    """Head-major. The library checks nothing of what it is told to write: a slot of -1 lands in somebody's block."""

    __slots__ = ()
    axes = HEAD_MAJOR

    def _store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Raises ValueError for slots that the cache does not have."""
        keep = slots >= 0
        if not bool(keep.all()):
            key, value, slots = key[keep], value[keep], slots[keep]
        if not len(slots):
            return
        room, highest = min(len(keys) * self.block_size, _MOST), int(slots.max())
        if highest >= room:
            raise ValueError(f"slot {highest} is not in the cache: it has {room} that can be written")
        library.operators(library.CPU).reshape_and_cache(
            self._taken(key), self._taken(value), keys, values, slots.to(torch.int32), word(self.dtype), 1.0, 1.0
        )

    def _taken(self, rows: Tensor) -> Tensor:
        """In a dtype that the library converts from, its last axis without gaps."""
        if self.dtype != FP8:
            rows = rows.to(self.dtype)
        elif rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        return rows if rows.stride(-1) == 1 else rows.contiguous()


class XPULayout(IPEXLayout):
    """On Intel's GPUs the library passes over slots of -1 itself, and nothing here waits for the device."""

    __slots__ = ()

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """Undefined contents. Raises ValueError for so many that the library's numbers do not reach the last."""
        elements = num_blocks * self.block_size * self.kv_heads * self.head_size
        if elements > _MOST:
            raise ValueError(
                f"{num_blocks} blocks are {elements} elements of one layer's keys, the library counts {_MOST}: "
                f"MAX_BATCH_TOTAL_TOKENS={_MOST // (self.kv_heads * self.head_size)} is the most"
            )
        return super().allocate(num_blocks, device)

    def _taken(self, rows: Tensor) -> Tensor:
        """In the cache's dtype, at whose elements the library does not look, and a token's heads without gaps."""
        rows = rows.to(self.dtype)
        dense = rows.stride(-1) == 1 and rows.stride(-2) == self.head_size
        return rows if dense else rows.contiguous()


class XPUFlashLayout(XPULayout):
    """Token-major: [blocks, block size, heads, head size]."""

    __slots__ = ()
    axes = TOKEN_MAJOR

    def _store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        library.operators(library.XPU).reshape_and_cache_flash(
            self._taken(key), self._taken(value), keys, values, slots.contiguous(), "auto", 1.0, 1.0
        )


class XPUPagedLayout(XPULayout):
    """[blocks, heads, head size, block size], keys with an axis of one behind it when they are written."""

    __slots__ = ()
    axes = Axes("block head dim slot")

    def _store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        library.operators(library.XPU).reshape_and_cache(
            self._taken(key), self._taken(value), keys[..., None], values, slots.contiguous(), "auto", 1.0, 1.0
        )
