"""Layouts of named axes that a kernel writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import Axes, AxesLayout, KVCache


@dataclass(frozen=True, slots=True)
class TritonAxes(Axes):
    """As `Axes`, for layouts that a Triton kernel writes."""

    def __call__(self, spec: AttentionSpec, block_size: int) -> TritonLayout:
        """The layout of one group of layers. Raises ValueError on axes that make no sense."""
        plain = Axes.__call__(self, spec, block_size)
        return TritonLayout(plain.layers, plain.block_size, plain.dtype, plain.key_order, plain.value_order)


@dataclass(frozen=True, slots=True, eq=False)
class TritonLayout(AxesLayout):
    """A scatter of PyTorch's is several small kernels a layer; here it is one."""

    def write(self, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [tokens, kv_heads, head_size]; slots: [tokens] int64, -1 writes nothing."""
        from octavo_triton import launch

        if len(slots):
            launch.write(self, cache, layer, key, value, slots)


TOKEN_MAJOR = TritonAxes("block slot head dim")
"""A token's heads together: tiles are rows of a block."""
PAGED = TritonAxes("block head dim/x slot x", "block head dim slot")
"""The layout of the first PagedAttention kernels (arXiv 2309.06180)."""
