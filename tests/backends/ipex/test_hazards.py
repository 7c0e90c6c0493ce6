"""What ends a process or gives wrong numbers in the library, and what octavo does about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention.contract import HostLengths
from octavo.attention.device import CPU
from octavo.kv.layout import KVCache
from octavo_ipex.backend import FlashDecodingBackend, PagedBackend
from octavo_ipex.base import IPEXBackend
from tests.backends.ipex.steps import WHERE, Step, spec_of

BOTH = pytest.mark.parametrize("kind", [FlashDecodingBackend, PagedBackend])

pytestmark = pytest.mark.usefixtures("kernels", "processor")


def test_rows_that_begin_with_the_same_block_are_no_beams() -> None:
    step = Step(PagedBackend, [40, 41, 50, 60, 33], [1] * 5, shared=2)
    step.check(step.attend())


@pytest.mark.parametrize("contexts", [[40, 41, 50, 60, 33], [600, 300, 129, 128, 257]])
def test_no_beams_with_biases_either(contexts: list[int]) -> None:
    """Slopes as if for other heads, in contexts of several partitions of the kernel too."""
    slopes = tuple(0.3 / (1 + head) for head in range(8))
    step = Step(PagedBackend, contexts, [1] * 5, shared=2, spec=spec_of(alibi_slopes=slopes))
    step.check(step.attend())


@BOTH
def test_what_a_window_hides_counts_for_nothing(kind: type[IPEXBackend]) -> None:
    """Where logits are low, and whole partitions are hidden."""
    step = Step(kind, [600, 300, 129], [1] * 3, spec=spec_of(window=20))
    keys = [keys for keys, _ in step.rows]
    step.query = torch.ones_like(step.query)
    for row, held in enumerate(keys):
        held -= 5
        step.backend.layout.write(
            step.cache, 0, held, step.rows[row][1], step._slots(step.batch.block_table[row], len(held))
        )
    step.check(step.attend())


@BOTH
@pytest.mark.parametrize("window", [1, 2, 16])
def test_a_window_counts_the_token_itself(kind: type[IPEXBackend], window: int) -> None:
    step = Step(kind, [40, 16, 30], [1, 1, 20], spec=spec_of(window=window))
    step.check(step.attend())


@BOTH
def test_a_slot_of_padding_is_not_written(kind: type[IPEXBackend]) -> None:
    layout = kind(spec_of(), 16, CPU()).layout
    room = [torch.zeros(5, 2, 16, 64) for _ in range(2)]
    cache = KVCache((room[0][1:-1],), (room[1][1:-1],))
    new = torch.ones(4, 2, 64)
    layout.write(cache, 0, new, new, torch.tensor([-1, 17, -1, 18]))
    layout.write(cache, 0, new, new, torch.tensor([-1, -1, -1, -1]))
    for held in room:
        assert held.sum() == 2 * 2 * 64
        assert held[2, :, 1:3].sum() == held.sum()


@pytest.mark.parametrize(
    ("slots", "problem"),
    [([0, 1, 48], "slot 48 is not in the cache: it has 48"), ([0, 1], "3 keys and 3 values are for as many slots")],
)
def test_slots_that_are_not_there_are_refused(slots: list[int], problem: str) -> None:
    layout = FlashDecodingBackend(spec_of(), 16, CPU()).layout
    cache, new = layout.allocate(3, WHERE), torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match=problem):
        layout.write(cache, 0, new, new, torch.tensor(slots))


@BOTH
def test_a_block_that_is_not_there_is_refused(kind: type[IPEXBackend]) -> None:
    step = Step(kind, [40, 20], [1, 1])
    for wrong, problem in ((99, "block 99 of the table is not in a cache of 6"), (-1, "a block of the table is negat")):
        table = step.batch.block_table.clone()
        table[1, 0] = wrong
        with pytest.raises(ValueError, match=problem):
            step.attend(block_table=table)


@BOTH
@pytest.mark.parametrize("window", [None, 1, 16])
def test_a_row_without_keys_is_zeros(kind: type[IPEXBackend], window: int | None) -> None:
    """Nor what padding holds, where tokens see themselves alone."""
    step = Step(kind, [40, 0, 20, 0], [1, 1, 1, 1], spec=spec_of(window=window))
    answer = step.attend()
    step.check(answer)
    assert answer[[1, 3]].count_nonzero() == 0


@BOTH
def test_a_step_without_queries_is_not_divided_by(kind: type[IPEXBackend]) -> None:
    step = Step(kind, [40, 20], [0, 0])
    assert step.attend().shape == (0, 8, 64)


@BOTH
@pytest.mark.parametrize("told", [0, 1, 1000])
def test_maxima_are_counted_not_believed(kind: type[IPEXBackend], told: int) -> None:
    step = Step(kind, [100, 40, 30], [1, 1, 30])
    step.check(step.attend(max_query=told, max_context=told))


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_are_made_as_the_library_reads_them(kind: type[IPEXBackend], dtype: torch.dtype) -> None:
    """Without strides, and of 32 bits."""
    step = Step(kind, [100, 40, 30], [1, 1, 3])
    wide = torch.full((3, 20), 2**20, dtype=dtype)
    wide[:, : step.batch.block_table.shape[1]] = step.batch.block_table
    step.check(step.attend(block_table=wide[:, : step.batch.block_table.shape[1]]))
    step.check(step.attend(context_lengths=torch.tensor([100, 0, 40, 0, 30])[::2]))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"context_lengths": torch.tensor([500, 20])}, "a context of 500 tokens is not in a block table of 48"),
        ({"context_lengths": torch.tensor([40, 2])}, "3 queries cannot be the last of a context of 2 tokens"),
        ({"query_starts": torch.tensor([0, 1, 2])}, r"the query is \(4, 8, 64\) .* the step's is \(2, 8, 64\)"),
        ({"context_lengths": torch.tensor([-40, 20])}, "cannot be the last of a context of -40|negative"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(changed: dict[str, Tensor], problem: str) -> None:
    step = Step(FlashDecodingBackend, [40, 20], [1, 3])
    with pytest.raises(ValueError, match=problem):
        step.attend(**changed)


def test_lengths_of_the_host_are_taken_where_core_gives_them() -> None:
    step = Step(PagedBackend, [40, 20], [1, 3])
    host = HostLengths(np.array([0, 1, 4], dtype=np.int32), np.array([40, 20], dtype=np.int32))
    step.check(step.attend(host_lengths=host, context_lengths=torch.tensor([7, 7], dtype=torch.int32)))


@BOTH
@pytest.mark.parametrize("wrong", ["strides", "shape", "dtype"])
def test_another_cache_is_refused(kind: type[IPEXBackend], wrong: str) -> None:
    step = Step(kind, [40, 20], [1, 3])
    (values,) = step.cache.values
    others = {
        "strides": values.transpose(1, 2).contiguous().transpose(1, 2), "shape": values[..., :32].contiguous(),
        "dtype": values.half(),
    }  # fmt: skip
    step.cache = KVCache(step.cache.keys, (others[wrong],))
    with pytest.raises(ValueError, match="is not one of"):
        step.attend()


def test_a_query_of_another_dtype_is_refused() -> None:
    step = Step(FlashDecodingBackend, [40, 20], [1, 3])
    step.query = step.query.half()
    with pytest.raises(ValueError, match=r"of torch.float16, the step's is .* of torch.float32"):
        step.attend()


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@BOTH
def test_no_soft_cap_is_no_soft_cap(kind: type[IPEXBackend], softcap: float | None) -> None:
    step = Step(kind, [40, 20, 200], [1, 1, 3], spec=spec_of(softcap=softcap), spread=3.0)
    step.check(step.attend())


@pytest.mark.parametrize("size", [256, 48, 24, 8])
def test_blocks_that_break_the_heap_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block size {size} is not supported"):
        PagedBackend(spec_of(), size, CPU())


@BOTH
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float16, torch.float8_e5m2), (torch.float32, torch.float8_e4m3fn), (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
    ],
)  # fmt: skip
def test_dtypes_that_it_does_not_take_are_refused(
    kind: type[IPEXBackend], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=r"is not supported|is not for queries of"):
        kind(spec_of(dtype=dtype, kv_dtype=kv_dtype), 16, CPU())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_bytes_takes_what_another_cache_held(dtype: torch.dtype) -> None:
    """float16 too, from which the library does not convert."""
    layout = PagedBackend(spec_of(dtype=dtype, kv_dtype=torch.float8_e5m2), 16, CPU()).layout
    cache, slots = layout.allocate(3, WHERE), torch.tensor([5, 40])
    for given in (torch.float16, torch.float32, torch.float8_e5m2):
        new = torch.randn(2, 2, 64).to(torch.float8_e5m2)
        layout.write(cache, 0, new.to(given), new.to(given), slots)
        for held in layout.read(cache, 0, slots):
            assert torch.equal(held.float(), new.float())
