"""What the ROCm backends launch compiles for every chip, and fits there: no GPU is needed to know.

A few configurations of each; `make kernels` compiles all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.attention.ahead import CompiledKernel
from octavo_rocm.backend import FlashDecodingBackend, PagedBackend
from octavo_triton.gpu import GPUBackend
from octavo_triton.tuning import tunings
from tests.backends.compiled import DOTS, chip_of, compiled, fits

FP8 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
CHIPS = sorted({architecture for architecture, _ in tunings(FlashDecodingBackend.folder / "tuning.json")})


def wanted(target: str) -> dict[type[GPUBackend], list[str]]:
    """Head sizes 64 and 128 in bfloat16 and float8 where a cache of it is; the other chips' compiler is the same."""
    if target not in FP8:
        return {FlashDecodingBackend: ["b256 32/8x128 bfloat16"], PagedBackend: ["b16 32/8x64 bfloat16"]}
    fp8 = f"bfloat16 cache {FP8[target]}"
    return {
        FlashDecodingBackend: ["b256 32/8x128 bfloat16", "b256 32/8x64 bfloat16", f"b256 32/8x128 {fp8}"],
        PagedBackend: ["b16 32/8x128 bfloat16 within 2 GiB", f"b16 32/8x64 {fp8}"],
    }


@pytest.mark.parametrize("target", CHIPS)
def test_kernels_compile_and_fit(target: str, tmp_path: Path) -> None:
    found = compiled(wanted(target), target, tmp_path)
    assert {one.kernel for one in found} == {"decode.split", "prefill.cut", "write.write"} | DOTS
    for one in found:
        fits(one, chip_of(FlashDecodingBackend, target))
        assert one.scratch_bytes == 0, one
        if one.kernel in DOTS:
            loads_tiles_whole(one)
    assemblies = list(tmp_path.glob("*/decode.amdgcn"))
    assert assemblies
    for assembly in assemblies:
        stores_are_waited_for(assembly.read_text(encoding="utf-8").splitlines())


def loads_tiles_whole(one: CompiledKernel) -> None:
    """Nothing is loaded one by one, but 16 bytes a thread at a time: keys and values, where a tile has so many.

    Prompts have more threads to a tile, and of a float8 with heads of 64 each has 8 bytes.
    """
    assert one.narrow_loads == 0, one
    if one.kernel == "decode.decode" or "float8" not in one.configuration:
        assert one.wide_loads >= 2, one


def stores_are_waited_for(lines: Sequence[str]) -> None:
    """By every thread, before the barrier behind which one thread counts its program's part of a context as done."""
    counted = next(number for number, line in enumerate(lines) if "global_atomic_add" in line)
    barrier = max(number for number in range(counted) if re.search(r"s_barrier(_signal.*)?$", lines[number]))
    stored = max(number for number in range(barrier) if re.search(r"\b(global|buffer)_store_", lines[number]))
    waited = r"s_waitcnt .*vmcnt\(0\)|s_waitcnt_vscnt null, 0x0|s_wait_storecnt 0x0"
    assert any(re.search(waited, line) for line in lines[stored:barrier]), lines[stored : barrier + 1]
