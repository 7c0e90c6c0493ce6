"""The CUDA backends without a card: what GPUs of several generations can."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from octavo.attention.device import CUDA
from octavo_cuda.backend import FlashDecodingBackend


class Card(CUDA):
    """A card that is not there."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)])
def test_float8_with_four_bits_of_exponent_is_for_gpus_that_convert_it(
    capability: tuple[int, int], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From compute capability 8.9 on there are instructions for it (PTX ISA, cvt with .e4m3x2)."""
    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor, shared_memory_per_block=1 << 16, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    declared = FlashDecodingBackend.capabilities
    without = tuple(dtype for dtype in declared.kv_dtypes if dtype != torch.float8_e4m3fn)
    lesser = replace(declared, kv_dtypes=without, chip=f"sm_{major}{minor}")
    assert FlashDecodingBackend.capabilities_on(Card()) == (declared if able else lesser)
