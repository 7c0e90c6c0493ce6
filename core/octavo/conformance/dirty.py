"""A cache that starts dirty, and that sees what changes in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.device import Device
from octavo.conformance.configuration import Configuration
from octavo.conformance.truth import Fault
from octavo.kv.layout import KVCacheLayout

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DirtyCache:
    """The cache of one backend object. Only `layout` touches what it holds."""

    def __init__(
        self, layout: KVCacheLayout, configuration: Configuration, device: Device, generator: torch.Generator
    ) -> None:
        self.layout = layout
        self.spec = configuration.spec
        self.block_size = configuration.block_size
        self.device = device.torch_device
        pool_size = 32 + 600 // self.block_size
        below = self._unused_blocks(device) if configuration.high else 1
        self.elements = (below + pool_size) * self.block_size * self.spec.kv_heads * self.spec.head_size
        """Of one layer's keys: where the last of them stands, in most layouts."""
        self.cache = layout.allocate(below + pool_size, self.device)
        self.pool: list[int] = (below + torch.randperm(pool_size, generator=generator)).tolist()
        """Blocks that rows may own, shuffled."""
        self._free = list(self.pool)
        blocks = torch.tensor([0, *self.pool]).unsqueeze(1)
        self.slots = (blocks * self.block_size + torch.arange(self.block_size)).flatten().to(self.device)
        """[slots] int64: of the scratch block, then of the pool's blocks in their order."""
        self._soil(configuration)

    def _unused_blocks(self, device: Device) -> int:
        """How many blocks stand below the pool's: up to offsets of 2^31 elements, as far as memory allows."""
        past_int32 = 2**31 // (self.block_size * self.spec.kv_heads * self.spec.head_size) + 1
        return max(1, min(past_int32, device.memory().free // 2 // self.layout.block_bytes))

    def _soil(self, configuration: Configuration) -> None:
        shape = (len(self.slots), self.spec.kv_heads, self.spec.head_size)
        fills = (configuration.dirt.key_fill, configuration.dirt.value_fill)
        key, value = (torch.full(shape, fill, dtype=self.spec.dtype, device=self.device) for fill in fills)
        for layer in range(self.spec.layers):
            self.layout.write(self.cache, layer, key, value, self.slots)

    def take(self) -> int:
        """A block that no row owns."""
        return self._free.pop()

    def write(self, key: Tensor, value: Tensor, slots: Sequence[int] | Tensor) -> None:
        """Put key and value [layers, tokens, kv_heads, head_size] at slots [tokens] of every layer."""
        slots = torch.as_tensor(slots, dtype=torch.int64, device=self.device)
        for layer in range(self.spec.layers):
            self.layout.write(self.cache, layer, key[layer], value[layer], slots)

    def snapshot(self) -> list[Tensor]:
        """Every bit at `slots`: keys of layer 0, values of layer 0, keys of layer 1, and so on."""
        held = [self.layout.read(self.cache, layer, self.slots) for layer in range(self.spec.layers)]
        return [bits(tensor) for pair in held for tensor in pair]

    def check_unchanged(self, before: list[Tensor], written: Tensor | None = None, layer: int | None = None) -> None:
        """Raise Fault with the first slot, other than `written` [n], that has changed since the snapshot `before`.

        `layer`: the one that was written; None: all were.
        """
        for index, (was, now) in enumerate(zip(before, self.snapshot(), strict=True)):
            changed = (was != now).flatten(1).any(dim=1)
            if written is not None and layer in (None, index // 2):
                changed &= ~torch.isin(self.slots, written)
            if changed.any():
                what = "value" if index % 2 else "key"
                raise Fault(f"the {what} in slot {int(self.slots[changed][0])} of layer {index // 2} has changed")


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself."""
    return tensor.contiguous().view(BITS[tensor.dtype.itemsize])
