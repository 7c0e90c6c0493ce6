"""What the CUDA backends launch compiles for every architecture, and fits there: no GPU is needed to know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.backends.triton.compiler import REGISTERS, SHARED_BYTES, WARP_GROUPS

SPILLED = 768
"""Bytes of a thread's stack: what is saved around a loop. More is a tile that does not fit."""


def compiled(target: str) -> list[dict[str, Any]]:
    """By a process of its own, whose kernels are not interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.triton.compiler", target],
        capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    found = compiled(target)
    names = {"split", "cut", "decode", "prefill", "write", "one_row", "few_rows", REGISTERS}
    assert {one["kernel"] for one in found} == names | ({WARP_GROUPS} if target == "sm_90" else set())
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES[target], one
        if one["kernel"] in ("decode", "prefill", "few_rows", REGISTERS, WARP_GROUPS) and "float32" not in one["shape"]:
            assert one["matrix_unit"], one
        assert one["spilled_bytes"] <= SPILLED, one
