"""Correct backends pass: the reference in each stock layout, a minimal one, and one that shares nothing with them."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec, Capabilities
from octavo.attention.phases import phased
from octavo.conformance import Suite
from octavo.kv.layout import PACKED, TOKEN_MAJOR, KVCacheLayout, LayoutType
from octavo_cpu.backend import FlashDecodingBackend
from octavo_reference.backend import ReferenceBackend
from tests.conformance.minimal import MinimalBackend
from tests.conformance.vectorised import Vectorised

NARROW = replace(
    ReferenceBackend.capabilities,
    dtypes=(torch.float32,),
    kv_dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    head_sizes=(64,),
    block_sizes=(16, 24),
)
"""Layouts differ by what they do with sizes: a short run is enough for the second and third."""


class TokenMajorReference(ReferenceBackend):
    capabilities = NARROW
    layout_type = TOKEN_MAJOR


class PackedReference(ReferenceBackend):
    capabilities = NARROW
    layout_type = PACKED


class FewHeadSizes(FlashDecodingBackend):
    capabilities = replace(FlashDecodingBackend.capabilities, head_sizes=(8, 64, 72, 128, 256))


class FlatLayout(KVCacheLayout):
    """One tensor for all layers, a line for each slot: nothing that octavo knows."""

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        self.spec, self.block_size = spec, block_size

    @property
    def block_bytes(self) -> int:
        return 2 * self.spec.layers * self.block_size * self.spec.kv_heads * self.spec.head_size * self._itemsize

    @property
    def _itemsize(self) -> int:
        return self.spec.kv_dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        slots = num_blocks * self.block_size
        shape = (slots + 1, self.spec.layers, 2, self.spec.kv_heads, self.spec.head_size)
        return torch.empty(shape, dtype=self.spec.kv_dtype, device=device)

    def write(self, cache: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Slot -1 is the last line, which nobody reads."""
        cache[slots, layer] = torch.stack([key, value], dim=1).to(cache.dtype)

    def read(self, cache: Tensor, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        key, value = cache[slots, layer].unbind(dim=1)
        return key, value

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        lines = torch.arange(self.block_size)
        from_lines, to_lines = ((blocks[:, None] * self.block_size + lines).flatten() for blocks in (sources, targets))
        cache[to_lines] = cache[from_lines]


class FlatBackend(MinimalBackend):
    """Declares little: one size of everything, a cache of one byte, no prefixes, no graphs, a spare slot."""

    capabilities = Capabilities(
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.float8_e4m3fn, torch.bfloat16),
        head_sizes=(32,),
        block_sizes=(128,),
        spare_slots=1,
    )
    layout_type: ClassVar[LayoutType] = FlatLayout


class TestFlashDecoding(Suite):
    backend = FewHeadSizes


class TestTwoPhases(Suite):
    """One prefills, the other decodes, in captured steps too."""

    backend = phased(TokenMajorReference, MinimalBackend)


class TestReference(Suite):
    backend = ReferenceBackend


class TestTokenMajorReference(Suite):
    backend = TokenMajorReference


class TestPackedReference(Suite):
    backend = PackedReference


class TestFlat(Suite):
    backend = FlatBackend


class TestVectorised(Suite):
    backend = Vectorised
