"""`cuda/flashdecoding` and `cuda/paged`: two layouts, one set of kernels."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from octavo.attention.device import Device
from octavo_triton.gpu import GPU, GPUBackend, capabilities
from octavo_triton.layout import PAGED, TOKEN_MAJOR

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OLDEST = (8, 0)
_E4M3 = (8, 9)
"""Compute capabilities: what Triton's products need, and what has an instruction for that dtype."""


class CUDABackend(GPUBackend):
    """What both layouts share."""

    platform = "cuda"
    contract = 1
    folder = Path(__file__).parent

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

    @classmethod
    def missing(cls, architecture: str) -> Collection[torch.dtype]:
        """What has no instruction there."""
        return () if _capability(architecture) >= _E4M3 else (torch.float8_e4m3fn,)

    @classmethod
    def gpu(cls, device: Device) -> GPU:
        """As the driver says."""
        properties = torch.cuda.get_device_properties(device.torch_device)
        shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        return GPU(f"sm_{properties.major}{properties.minor}", shared, properties.multi_processor_count)


def _capability(architecture: str) -> tuple[int, int]:
    """Of "sm_89": (8, 9)."""
    digits = re.fullmatch(r"sm_(\d+)(\d)", architecture)
    assert digits is not None
    return int(digits[1]), int(digits[2])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


class FlashDecodingBackend(CUDABackend):
    """Token-major blocks, large ones where nobody asks for others."""

    name = "flashdecoding"
    priority = 20
    capabilities = capabilities(256, _FLOAT8)
    layout_type = TOKEN_MAJOR


class PagedBackend(CUDABackend):
    """The layout of the first PagedAttention kernels (arXiv 2309.06180)."""

    name = "paged"
    priority = 10
    capabilities = capabilities(16, _FLOAT8)
    layout_type = PAGED
