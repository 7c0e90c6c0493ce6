"""`rocm/flashdecoding` and `rocm/paged`: two layouts, one set of kernels."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from octavo.attention.device import Device
from octavo_triton.gpu import GPU, GPUBackend, capabilities
from octavo_triton.layout import PAGED, TOKEN_MAJOR
from octavo_triton.tuning import tunings

_FNUZ = torch.float8_e4m3fnuz
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, _FNUZ)
"""gfx942 has instructions that convert those with one zero (fnuz, arXiv 2206.02915), gfx950 and gfx1201 those of the
Open Compute Project. Triton converts the latter by shifts and a product elsewhere; e4m3fnuz on no other chip, and
float32 to e5m2fnuz on none."""
_ALIKE = {"gfx1101": "gfx1100", "gfx1102": "gfx1100", "gfx1200": "gfx1201"}
"""Smaller chips of a generation, whose processors are the same."""


class ROCmBackend(GPUBackend):
    """What both layouts share."""

    platform = "rocm"
    contract = 1
    folder = Path(__file__).parent
    waiting = 1

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A GPU of AMD's for which there are tiles, and Triton."""
        if device.name != "rocm":
            return f"it runs on rocm, not on {device.name}"
        if reason := super().probe(device):
            return reason
        known = {architecture for architecture, _ in tunings(cls.folder / "tuning.json")}
        found = _architecture(device.torch_device)
        return (
            None if found in known else f"it knows {', '.join(sorted(known))} and chips like them, this GPU is {found}"
        )

    @classmethod
    def missing(cls, architecture: str) -> Collection[torch.dtype]:
        """Where Triton aborts, or takes one kind for the other."""
        return () if architecture == "gfx942" else (_FNUZ,)

    @classmethod
    def gpu(cls, device: Device) -> GPU:
        """As the driver says."""
        properties = torch.cuda.get_device_properties(device.torch_device)
        architecture = _architecture(device.torch_device)
        return GPU(architecture, properties.shared_memory_per_block, properties.multi_processor_count)


def _architecture(device: torch.device) -> str:
    """Without what the driver says of its features: "gfx942:sramecc+:xnack-"."""
    name: str = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return _ALIKE.get(name, name)


class FlashDecodingBackend(ROCmBackend):
    """Token-major blocks, large ones where nobody asks for others."""

    name = "flashdecoding"
    priority = 20
    capabilities = capabilities(256, _FLOAT8)
    layout_type = TOKEN_MAJOR


class PagedBackend(ROCmBackend):
    """The layout of the first PagedAttention kernels (arXiv 2309.06180)."""

    name = "paged"
    priority = 10
    capabilities = capabilities(16, _FLOAT8)
    layout_type = PAGED
