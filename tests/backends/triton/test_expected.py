"""What is calculated of GPUs that are not here, against the kernel that shares out the work, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo_cuda.backend import FlashDecodingBackend
from octavo_triton import launch
from octavo_triton.expected import expected, share_out
from octavo_triton.plan import FIELDS, Decodes, Scratch
from tests.backends.compiled import chip_of
from tests.backends.triton.interpreted import TILE
from tests.distributions import spec


@settings(max_examples=15, deadline=None)
@given(contexts=st.lists(st.integers(1, 3000), min_size=1, max_size=30), wanted=st.integers(1, 40))
@example(contexts=[65536, *[512] * 63], wanted=132)
@example(contexts=[1024] * 256, wanted=76)
def test_parts_are_those_that_the_kernel_makes(contexts: list[int], wanted: int) -> None:
    room = 6 * wanted + len(contexts)
    items = torch.full((room, FIELDS), -7, dtype=torch.int32)
    work = Decodes(len(contexts), TILE, wanted, 0, items, Scratch(torch.empty(0), torch.empty(0)))
    table = torch.zeros(len(contexts), 1, dtype=torch.int32)
    launch.split(work, torch.tensor(contexts, dtype=torch.int32), table, 1 << 20, None)
    rows = items[:, 0][items[:, 0] >= 0]
    assert share_out(contexts, wanted, room, TILE.keys) == torch.bincount(rows, minlength=len(contexts)).tolist()


def test_seconds_by_hand() -> None:
    chip = replace(chip_of(FlashDecodingBackend, "sm_90"), processors=10, bytes_per_second=1e9)
    asked = spec(heads=8, kv_heads=2, head_size=64, kv_dtype=torch.bfloat16)
    whole = expected(asked, [100] * 5, [1] * 5, chip, 1)
    assert (whole.read_bytes, whole.programs, whole.turns) == (2 * 500 * 2 * 64 * 2, 10, 1)
    assert whole.seconds == pytest.approx(whole.read_bytes / 1e9)
    parts = expected(asked, [500], [5], chip, 1)
    assert parts.seconds == pytest.approx((whole.read_bytes + 2 * 5 * 8 * 66 * 4) / 1e9)
    late = expected(asked, [100] * 6, [1] * 6, chip, 1)  # two programs are left for a second turn
    assert late.turns == 2
    assert late.seconds == pytest.approx(late.read_bytes / 1e9 * 20 / 12)
