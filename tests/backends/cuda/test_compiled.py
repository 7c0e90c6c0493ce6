"""What the CUDA backends launch compiles for every architecture, and fits there: no GPU is needed to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo_cuda.backend import FlashDecodingBackend, PagedBackend
from tests.backends.compiled import DOTS, chip_of, compiled, fits

SCRATCH = 1024
"""Bytes of a thread: what is saved around a loop. More is a tile that does not fit."""
PLANNING = {"decode.split", "prefill.cut", "write.write"}
FLASH = ["b256 32/8x128 bfloat16", "b24 32/8x80 bfloat16"]
PAGED = ["b16 32/8x128 bfloat16", "b16 32/8x64 float32"]
UNLIKE = [
    "b256 32/8x128 bfloat16 cache float8_e5m2 sinks softcap window", "b256 32/8x64 bfloat16", "b256 32/1x128 bfloat16",
    "b256 32/8x256 bfloat16 sinks softcap window", "b256 32/8x128 bfloat16 invariant",
    "b256 32/8x128 bfloat16 cache float32",
]  # fmt: skip
FLOAT8 = ["b16 32/8x128 bfloat16 cache float8_e4m3fn"]
"""Instructions of sm_89 and newer unpack it where rows decode from registers."""


# One architecture stands for the others in what they compile alike.
@pytest.mark.parametrize(("target", "more"), [("sm_80", []), ("sm_90", UNLIKE), ("sm_100", [])], ids=str)
def test_every_kernel_compiles_and_fits(target: str, more: list[str], tmp_path: Path) -> None:
    paged = PAGED + FLOAT8 * (target == "sm_90")
    found = compiled({FlashDecodingBackend: FLASH + more, PagedBackend: paged}, target, tmp_path)
    by_warp_groups = {"hopper.prefill"} if target == "sm_90" else set()
    assert {one.kernel for one in found} == PLANNING | DOTS | by_warp_groups | {"registers.decode"}
    for one in found:
        fits(one, chip_of(FlashDecodingBackend, target))
        assert one.scratch_bytes <= SCRATCH, one
        if one.kernel in ("registers.decode", "hopper.prefill"):
            assert one.matrix_instructions > 0, one
