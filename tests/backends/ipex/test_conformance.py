"""The whole suite: over stand-ins of both builds anywhere, and over the library for CPUs where it is installed."""

from dataclasses import replace

import pytest
import torch

from octavo.conformance import Suite
from octavo_ipex import library, xpu
from octavo_ipex.backend import FlashDecodingBackend, PagedBackend


class FewSizes(FlashDecodingBackend):
    """What stands in for the library does the same at every size."""

    capabilities = replace(FlashDecodingBackend.capabilities, head_sizes=(40, 64, 80), block_sizes=(64, 16, 256))


class FewPagedSizes(PagedBackend):
    capabilities = replace(PagedBackend.capabilities, head_sizes=(40, 64, 80), block_sizes=(16, 128))


@pytest.mark.usefixtures("on_stand_in")
class TestFlashDecodingOnStandIn(Suite):
    backend = FewSizes
    left_out = ("high-blocks",)


@pytest.mark.usefixtures("on_stand_in")
class TestPagedOnStandIn(Suite):
    backend = FewPagedSizes
    left_out = ("high-blocks",)

    @pytest.fixture(autouse=True)
    def _avx512(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


class FlashDecodingOnCPU(xpu.FlashDecodingBackend):
    """What goes to Intel's GPUs is right if the library's source was read rightly: there is none here."""

    build = replace(library.XPU, device="cpu")


class PagedOnCPU(xpu.PagedBackend):
    build = replace(library.XPU, device="cpu")


@pytest.mark.usefixtures("on_stand_in")
class TestXPUFlashDecodingOnStandIn(Suite):
    backend = FlashDecodingOnCPU
    left_out = ("high-blocks",)


@pytest.mark.usefixtures("on_stand_in")
class TestXPUPagedOnStandIn(Suite):
    backend = PagedOnCPU
    left_out = ("high-blocks",)


if library.fault(library.CPU) is None:

    class TestFlashDecoding(Suite):
        backend = FlashDecodingBackend

    class TestPaged(Suite):
        backend = PagedBackend

    class TestPagedWithoutAVX512(Suite):
        """Rows that decode in float32 and bfloat16 go another way."""

        backend = PagedBackend
        left_out = ("generation", "high-blocks")

        @pytest.fixture(autouse=True)
        def _avx2(self, monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
