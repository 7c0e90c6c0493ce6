"""More broken backends: faults of layouts and declarations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import TOKEN_MAJOR, AxesLayout, KVCache, LayoutType
from tests.conformance.faults import Narrow, fault

# Layouts.


class WrappingLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        last = cache.keys[layer].shape[0] * self.block_size - 1
        super().write(cache, layer, key, value, torch.where(slots < 0, last, slots))


class SequentialLayout(AxesLayout):
    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        for source, target in zip(sources[:, None], targets[:, None], strict=True):
            super().copy_blocks(cache, source, target)


class KeysOnlyLayout(AxesLayout):
    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        super().copy_blocks(KVCache(cache.keys, ()), sources, targets)


class ContiguousLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        rows = torch.as_strided(key, key.shape, torch.empty(key.shape).stride(), key.storage_offset())
        super().write(cache, layer, rows, value, slots)


class OneLayerLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        for one in range(self.layers):
            super().write(cache, one, key, value, slots)


class BlockOneLayout(AxesLayout):
    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        super().write(cache, layer, key, value, torch.where(slots < 0, self.block_size, slots))


class FirstLayerLayout(AxesLayout):
    def copy_blocks(self, cache: KVCache, sources: Tensor, targets: Tensor) -> None:
        super().copy_blocks(KVCache(cache.keys[:1], cache.values[:1]), sources, targets)


class ViewedLayout(AxesLayout):
    def read(self, cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        if len(slots) == 2 and slots.tolist() == [0, 1] and self.block_size > 1:
            return self.key_view(cache, layer)[0, :2], self.value_view(cache, layer)[0, :2]
        return super().read(cache, layer, slots)


class KeysAloneLayout(AxesLayout):
    @property
    def block_bytes(self) -> int:
        return super().block_bytes // 2


class NanBeyondLayout(AxesLayout):
    """What is beyond 240 becomes NaN, as in a kind of fp8 (e4m3fnuz) that ends there."""

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        key, value = (part.masked_fill(part.abs() > 240, torch.nan) for part in (key, value))
        super().write(cache, layer, key, value, slots)


class SmallerFloatsLayout(AxesLayout):
    """Cuts at what another kind of fp8 (e4m3fnuz) ends at."""

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        super().write(cache, layer, key.clamp(-240, 240), value.clamp(-240, 240), slots)


class SwappedLayout(AxesLayout):
    """Reads heads and elements the other way round, which has the same shape where they are as many."""

    def read(self, cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().read(cache, layer, slots)
        return key.transpose(1, 2).reshape(key.shape), value


def made(layout: type[AxesLayout]) -> LayoutType:
    """Token-major, as `layout`."""

    def make(spec: AttentionSpec, block_size: int) -> AxesLayout:
        plain = TOKEN_MAJOR(spec, block_size)
        return layout(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)

    return make


@fault("slot -1 wraps around", "padding", "layout")
class Wrapping(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(WrappingLayout))


@fault("blocks copied one after another", "layout")
class Sequential(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(SequentialLayout))


@fault("only keys copied", "layout")
class KeysOnly(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(KeysOnlyLayout))


@fault("keys written as contiguous", "strided-inputs")
class ContiguousKeys(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(ContiguousLayout))


@fault("writing one layer writes all", "layout", "prefill")
class OneLayer(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(OneLayerLayout))


@fault("heads and elements swapped in read", "layout", "decode")
class Swapped(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(SwappedLayout))


@fault("padding writes to block 1", "padding", "layout")
class PaddingInBlockOne(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(BlockOneLayout))


@fault("blocks of the first layer copied alone", "layout")
class FirstLayer(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(FirstLayerLayout))


@fault("what is read is a view of the cache", "layout")
class Viewed(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(ViewedLayout))


@fault("block_bytes counts keys alone", "block-bytes")
class KeysAlone(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(made(KeysAloneLayout))


@fault("fp8 saturates to NaN", "fp8-scales")
class NanBeyond(Narrow):
    capabilities = replace(Narrow.capabilities, kv_dtypes=(torch.float8_e4m3fn,))
    layout_type: ClassVar[LayoutType] = staticmethod(made(NanBeyondLayout))


@fault("fp8 cut below its largest number", "fp8-scales")
class SmallerFloats(Narrow):
    capabilities = replace(Narrow.capabilities, kv_dtypes=(torch.float8_e4m3fn,))
    layout_type: ClassVar[LayoutType] = staticmethod(made(SmallerFloatsLayout))


# Declarations.


@fault("written for another contract", "declaration")
class OldContract(Narrow):
    contract = 0


@fault("block sizes declared that its layout refuses", "block-sizes", "layout")
class OverClaimed(Narrow):
    layout_type: ClassVar[LayoutType] = staticmethod(
        lambda spec, block_size: TOKEN_MAJOR(spec, block_size if block_size > 1 else 0)
    )


@fault("declares what makes no sense", "declaration")
class Senseless(Narrow):
    capabilities = replace(Narrow.capabilities, graphs="always")  # type: ignore[arg-type]


@fault("declares more for a device than at all", "declaration")
class MoreHere(Narrow):
    @classmethod
    def capabilities_on(cls, device: Device) -> Capabilities:
        return replace(cls.capabilities, head_sizes=(16, 24, 32))


class Permissive(Capabilities):
    def refusals(self, spec: AttentionSpec, block_size: int | None) -> list[str]:
        return []


@fault("refuses nothing", "undeclared-is-refused")
class Yes(Narrow):
    capabilities = Permissive(
        **{
            name: getattr(Narrow.capabilities, name) for name in Capabilities.__dataclass_fields__ if name != "features"
        },
        features=frozenset({"window"}),
    )


@fault("unknown options swallowed", "unknown-option")
class Swallowing(Narrow):
    def __init__(
        self, spec: AttentionSpec, block_size: int, device: Any, options: Any = None, sinks: Tensor | None = None
    ) -> None:
        super().__init__(spec, block_size, device, None, sinks)
