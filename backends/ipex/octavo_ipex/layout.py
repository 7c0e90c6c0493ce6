"""A cache that the library writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import HEAD_MAJOR, AxesLayout, KVCache
from octavo_ipex import library

FP8: Final = torch.float8_e5m2
"""The one dtype of a byte that the library knows."""
_MOST_SLOTS: Final = 2**31
"""It counts them in 32 bits."""


def word(kv_dtype: torch.dtype) -> str:
    """The library's name for a cache of this dtype."""
    return "fp8_e5m2" if kv_dtype == FP8 else "auto"


@dataclass(frozen=True, slots=True, eq=False)
class IPEXLayout(AxesLayout):
    """Head-major. The library checks nothing of what it is told to write: a slot of -1 lands in somebody's block."""

    @classmethod
    def of(cls, spec: AttentionSpec, block_size: int) -> IPEXLayout:
        """The layout of one group of layers."""
        plain = HEAD_MAJOR(spec, block_size)
        return cls(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [tokens, kv_heads, head_size]; slots: [tokens] int64, -1 writes nothing.

        Raises ValueError for slots that the cache does not have, or of another number than keys and values.
        """
        if not len(slots) == len(key) == len(value):
            raise ValueError(f"{len(key)} keys and {len(value)} values are for as many slots, not for {len(slots)}")
        keep = slots >= 0
        if not bool(keep.all()):
            key, value, slots = key[keep], value[keep], slots[keep]
        if not len(slots):
            return
        keys, values = cache.keys[layer], cache.values[layer]
        room, highest = min(len(keys) * self.block_size, _MOST_SLOTS), int(slots.max())
        if highest >= room:
            raise ValueError(f"slot {highest} is not in the cache: it has {room} that can be written")
        library.operators().reshape_and_cache(
            self._taken(key), self._taken(value), keys, values, slots.to(torch.int32), word(self.dtype), 1.0, 1.0
        )

    def _taken(self, rows: Tensor) -> Tensor:
        """In a dtype that the library converts from, its last axis without gaps."""
        if self.dtype != FP8:
            rows = rows.to(self.dtype)
        elif rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        return rows if rows.stride(-1) == 1 else rows.contiguous()
