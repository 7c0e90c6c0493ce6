"""The Triton backends on a CPU: the kernels are interpreted, in tiles so small that everything happens in them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from octavo.attention.device import Device
from octavo.kv.layout import LayoutType
from octavo_cuda.backend import FlashDecodingBackend, PagedBackend
from octavo_triton.backend import TritonBackend
from octavo_triton.tuning import DecodeTile, PrefillTile, Tuning

TILE = DecodeTile(keys=16, warps=4, stages=2, per_processor=12)
PROCESSORS = 8


class Interpreted(TritonBackend):
    """On a CPU that claims to have eight processors."""

    platform = "interpreted"
    contract = 1

    @classmethod
    def probe(cls, device: Device) -> str | None:
        return None

    def tune(self) -> Tuning:
        return Tuning(decode=TILE, prefill=PrefillTile(queries=32, keys=32, warps=4, stages=2))

    def count_processors(self) -> int:
        return PROCESSORS


class FlashDecoding(Interpreted):
    """Each operation of the interpreter takes as long as thousands of a GPU: one of each kind is enough."""

    name = "flashdecoding"
    capabilities = replace(
        FlashDecodingBackend.capabilities,
        dtypes=(torch.float32, torch.bfloat16),
        kv_dtypes=(torch.float32, torch.bfloat16, torch.float8_e4m3fn),
        head_sizes=(32, 80),
        block_sizes=(16, 24),
    )
    layout_type: ClassVar[LayoutType] = FlashDecodingBackend.layout_type


class Paged(Interpreted):
    """What differs from the other: where keys and values lie."""

    name = "paged"
    capabilities = replace(
        PagedBackend.capabilities,
        dtypes=(torch.float32,),
        kv_dtypes=(torch.float32, torch.float8_e4m3fn),
        head_sizes=(32,),
        block_sizes=(16, 1, 64),
        features=frozenset(),
    )
    layout_type: ClassVar[LayoutType] = PagedBackend.layout_type
