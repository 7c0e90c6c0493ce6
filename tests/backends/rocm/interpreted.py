"""The ROCm backends on a CPU: their kernels are interpreted, with the tiles of a chip that claims few processors."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.attention.contract import Capabilities
from octavo.attention.device import Device
from octavo_rocm.backend import FlashDecodingBackend, PagedBackend, ROCmBackend
from octavo_triton.gpu import GPU
from tests.backends.compiled import chip_of


def small(capabilities: Capabilities, *, block_sizes: tuple[int, ...]) -> Capabilities:
    """One of each kind: an operation of the interpreter takes as long as thousands of a GPU's."""
    return replace(
        capabilities,
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.bfloat16, torch.float8_e4m3fnuz),
        head_sizes=(32,),
        block_sizes=block_sizes,
    )


class _Interpreted(ROCmBackend):
    architecture = ""

    @classmethod
    def probe(cls, device: Device) -> str | None:
        return None

    @classmethod
    def gpu(cls, device: Device) -> GPU:
        return GPU(cls.architecture, chip_of(cls, cls.architecture).shared_bytes, 8)


class OnMI300X(_Interpreted, FlashDecodingBackend):
    architecture = "gfx942"
    capabilities = small(FlashDecodingBackend.capabilities, block_sizes=(256, 24))


class OnRadeon(_Interpreted, PagedBackend):
    architecture = "gfx1100"
    capabilities = small(PagedBackend.capabilities, block_sizes=(16, 1, 64))
