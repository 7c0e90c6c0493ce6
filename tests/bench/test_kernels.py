"""octavo bench kernels: what is counted is what attention does, and every batch of every backend has its row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.contract import AttentionSpec
from octavo.bench import device_time, kernels
from octavo.bench.kernels import Batch, Options, run
from tests.bench.test_report import units_are_named

SPEC = AttentionSpec(
    layers=1, heads=4, kv_heads=2, head_size=8, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
)  # fmt: skip


@given(rows=st.integers(1, 3), length=st.integers(2, 9), behind=st.integers(0, 9))
def test_operations_are_those_of_the_pairs_that_see_each_other(rows: int, length: int, behind: int) -> None:
    measures = kernels._measures(SPEC, Batch.prompts(rows, length, behind), taken=2.0, ceiling=1.0)
    pairs = sum(key <= behind + query for _ in range(rows) for query in range(length) for key in range(behind + length))
    assert measures == {"attend_seconds": 2.0, "operations_per_second": 4 * pairs * 4 * 8 / 2}


def test_bytes_are_those_of_keys_and_values() -> None:
    measures = kernels._measures(SPEC, Batch.decodes(3, 10), taken=0.5, ceiling=10_000.0)
    tensors = [torch.empty(10, 2, 8) for _ in range(3 * 2)]
    size = sum(tensor.nbytes for tensor in tensors)
    assert measures == {
        "attend_seconds": 0.5, "bytes_per_second": size / 0.5, "floor_percent": 100 * size / 10_000 / 0.5,
    }  # fmt: skip


@given(blocks=st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_each_row_has_blocks_of_its_own(blocks: list[int]) -> None:
    table = kernels._shuffled(blocks).tolist()
    used = [block for row, count in zip(table, blocks, strict=True) for block in row[:count]]
    assert sorted(used) == list(range(1, sum(blocks) + 1))


def options(**changed: object) -> Options:
    plain: dict[str, object] = {
        "attention": ["any/reference", None], "device": "cpu", "heads": 4, "kv_heads": 2, "head_size": 8,
        "dtype": None, "kv_dtype": None, "block_size": 16, "repeats": 1,
    }  # fmt: skip
    return Options(**(plain | changed))  # type: ignore[arg-type]


def test_every_backend_and_batch_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_time, "FLUSHED_BYTES", 16)
    monkeypatch.setattr(device_time, "_READ_BYTES", 1 << 16)
    monkeypatch.setattr(kernels, "SMALL", [Batch.decodes(2, 20), Batch.prompts(1, 5)])
    told: list[str] = []
    report = run(options(), told.append)
    assert [row["batch"] for row in report.rows] == ["2 x 20", "1 x 5"] * 2
    assert len(told) == len({(row["backend"], row["batch"]) for row in report.rows}) == 4
    assert units_are_named(report.rows)
    assert report.markdown().count("any/reference") == 2


def test_a_dtype_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="float7 is no dtype"):
        run(options(dtype="float7"), lambda _: None)
