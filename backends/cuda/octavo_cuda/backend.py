"""`cuda/flashdecoding` and `cuda/paged`: two layouts, one set of kernels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from octavo.attention.contract import AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import LayoutType
from octavo_triton.backend import TritonBackend
from octavo_triton.layout import TritonAxes
from octavo_triton.tuning import PLAIN, Tuning, fitted

_TABLE = Path(__file__).with_name("tuning.json")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CACHES = (*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
_HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 16, 32)
_OLDEST = (8, 0)
_E4M3 = (8, 9)
"""Compute capabilities: what Triton's products need, and what has an instruction for that dtype."""


class CUDABackend(TritonBackend):
    """What both layouts share."""

    platform = "cuda"
    contract = 1

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A GPU of NVIDIA's that Triton compiles for, and Triton."""
        if device.name != "cuda":
            return f"it runs on cuda, not on {device.name}"
        if reason := super().probe(device):
            return reason
        capability = torch.cuda.get_device_capability(device.torch_device)
        if capability < _OLDEST:
            return f"it needs compute capability {_dotted(_OLDEST)} or newer, this GPU has {_dotted(capability)}"
        return None

    def tune(self) -> Tuning:
        """What was measured on this architecture, cut down to the spec's sizes.

        Raises ValueError on a cache dtype that this GPU does not know.
        """
        capability = torch.cuda.get_device_capability(self.device.torch_device)
        if self.spec.kv_dtype == torch.float8_e4m3fn and capability < _E4M3:
            raise ValueError(
                f"a cache of fp8_e4m3fn needs compute capability {_dotted(_E4M3)}, this GPU has {_dotted(capability)}: "
                "KV_CACHE_DTYPE=fp8_e5m2 is as small"
            )
        properties = torch.cuda.get_device_properties(self.device.torch_device)
        shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        return tuned(self.name, self.spec, f"sm_{properties.major}0", shared)

    def count_processors(self) -> int:
        """Its multiprocessors."""
        return torch.cuda.get_device_properties(self.device.torch_device).multi_processor_count


def tuned(name: str, spec: AttentionSpec, architecture: str, shared_bytes: int) -> Tuning:
    """A backend's tiles for layers on an architecture, e.g. "sm_90", whose blocks may take so much shared memory."""
    dims = 1 << (spec.head_size - 1).bit_length()
    # A quarter is for what is not keys and values on their way: queries, and sums that change layout.
    itemsize = max(spec.dtype.itemsize, spec.kv_dtype.itemsize)
    measured = _measured().get((architecture, name), PLAIN)
    return fitted(measured, dims, itemsize, spec.group, shared_bytes * 3 // 4)


@cache
def _measured() -> dict[tuple[str, str], Tuning]:
    """By architecture and backend."""
    architectures = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        (architecture, name): Tuning.read(table)
        for architecture, backends in architectures.items()
        for name, table in backends.items()
    }


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


class FlashDecodingBackend(CUDABackend):
    """Token-major blocks, large ones where nobody asks for others."""

    name = "flashdecoding"
    priority = 20
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=_CACHES, head_sizes=_HEAD_SIZES, block_sizes=(256, ...),
        features=frozenset({"window", "softcap", "sinks"}), graphs="decode", prefix_caching=True,
        batch_invariant=True,
    )  # fmt: skip
    layout_type: ClassVar[LayoutType] = TritonAxes("block slot head dim")


class PagedBackend(CUDABackend):
    """The layout of the first PagedAttention kernels (arXiv 2309.06180)."""

    name = "paged"
    priority = 10
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=_CACHES, head_sizes=_HEAD_SIZES, block_sizes=(16, ...),
        features=frozenset({"window", "softcap", "sinks"}), graphs="decode", prefix_caching=True,
        batch_invariant=True,
    )  # fmt: skip
    layout_type: ClassVar[LayoutType] = TritonAxes("block head dim/x slot x", "block head dim slot")
