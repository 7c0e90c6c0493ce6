"""What is asked of the library's build for Intel's GPUs, over a stand-in made from its source; no GPU has seen it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import KVCache
from octavo_ipex.base import IPEXBackend
from octavo_ipex.xpu import FlashDecodingBackend, PagedBackend
from tests.backends.ipex import xpu_stand_in
from tests.backends.ipex.stand_in import Harm
from tests.backends.ipex.steps import WHERE, Card, Step, spec_of

KINDS: list[tuple[type[IPEXBackend], int]] = [(FlashDecodingBackend, 64), (PagedBackend, 16)]
BOTH = pytest.mark.parametrize(("kind", "size"), KINDS)
DTYPES = pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])

pytestmark = pytest.mark.usefixtures("on_stand_in")


def spec_in(
    dtype: torch.dtype = torch.float16, *, window: int | None = None, softcap: float | None = None
) -> AttentionSpec:
    return spec_of(dtype=dtype, kv_dtype=dtype, window=window, softcap=softcap)


@BOTH
@DTYPES
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prompts_and_rows_that_decode(
    kind: type[IPEXBackend], size: int, dtype: torch.dtype, limit: float, softcap: float | None
) -> None:
    step = Step(kind, [700, 64, 1, 130], [1, 1, 1, 130], size, spec=spec_in(dtype, softcap=softcap), spread=3.0)
    step.check(step.attend(), limit)


@pytest.mark.parametrize("window", [1, 2, 16, 64, 65, 5000])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_windows_count_the_token_itself(window: int, softcap: float | None) -> None:
    """Of rows that decode, chunks behind a cached prefix and prompts; one longer than all contexts hides nothing."""
    spec = spec_in(window=window, softcap=softcap)
    step = Step(FlashDecodingBackend, [700, 64, 300, 130], [1, 1, 70, 130], 64, spec=spec)
    step.check(step.attend(), 1e-3)


def test_windows_are_refused_where_rows_that_decode_would_ignore_them() -> None:
    with pytest.raises(ValueError, match="the model needs window 16: it supports softcap"):
        PagedBackend(spec_in(window=16), 16, Card())


@pytest.mark.parametrize(("contexts", "new"), [([40, 80], [1, 20]), ([40], [39])])
def test_a_chunk_behind_what_is_cached_is_refused(contexts: Sequence[int], new: Sequence[int]) -> None:
    step = Step(PagedBackend, contexts, new, spec=spec_in())
    with pytest.raises(ValueError, match="several queries behind keys of an earlier step"):
        step.attend()


@BOTH
def test_a_row_without_keys_is_zeros(kind: type[IPEXBackend], size: int) -> None:
    step = Step(kind, [40, 0, 90, 0], [1, 1, 90, 1], size, spec=spec_in())
    answer = step.attend()
    step.check(answer, 1e-3)
    assert answer[[1, -1]].count_nonzero() == 0


@BOTH
def test_a_step_without_queries_asks_nothing(kind: type[IPEXBackend], size: int) -> None:
    assert Step(kind, [40, 20], [0, 0], size, spec=spec_in()).attend().shape == (0, 8, 64)


@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [
        (FlashDecodingBackend, (3, 64, 2, 128), (3, 64, 2, 128)),
        (PagedBackend, (3, 2, 128, 64 // 2), (3, 2, 128, 64 // 2)),
    ],
)
def test_a_token_lies_where_the_kernels_look(
    kind: type[IPEXBackend], keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    """Token-major blocks; or its numbers a block's width apart, keys as [blocks, heads, head size, block size, 1]."""
    size = 64 if kind is FlashDecodingBackend else 32
    layout = kind(spec_of(dtype=torch.float16, kv_dtype=torch.float16, head_size=128), size, Card()).layout
    cache = layout.allocate(3, WHERE)
    assert (cache.keys[0].shape, cache.values[0].shape) == (keys, values)
    for held in (*cache.keys, *cache.values):
        held.zero_()
    fused = torch.randn(3, 2, 2, 128, dtype=torch.float16)  # keys and values of one product: tokens have gaps
    key, value = fused[:, 0], fused[:, 1]
    layout.write(cache, 0, key, value, torch.tensor([size + 5, -1, 2 * size]))
    layout.write(cache, 0, key[:0], value[:0], torch.tensor([], dtype=torch.int64))
    for held, new in ((cache.keys[0], key), (cache.values[0], value)):
        assert held.count_nonzero() == new[[0, 2]].count_nonzero()
        for token, block, offset in ((new[0], 1, 5), (new[2], 2, 0)):
            there = held[block, offset] if size == 64 else held[block, :, :, offset]
            assert torch.equal(there, token)


@BOTH
def test_transposed_and_wider_keys_are_made_what_is_read(kind: type[IPEXBackend], size: int) -> None:
    layout = kind(spec_in(), size, Card()).layout
    cache, new = layout.allocate(2, WHERE), torch.randn(2, 4, 64).transpose(0, 1)
    layout.write(cache, 0, new, new, torch.arange(8)[::2])
    for held in layout.read(cache, 0, torch.arange(8)[::2]):
        assert torch.equal(held, new.half())
    with pytest.raises(ValueError, match="4 keys and 4 values are for as many slots, not for 3"):
        layout.write(cache, 0, new, new, torch.arange(3))


@BOTH
def test_a_cache_beyond_32_bits_is_refused(kind: type[IPEXBackend], size: int) -> None:
    layout = kind(spec_in(), size, Card()).layout
    most = 2**31 // (2 * 64)
    assert isinstance(layout.allocate(most // size, torch.device("meta")), KVCache)
    with pytest.raises(ValueError, match=f"MAX_BATCH_TOTAL_TOKENS={most} is the most"):
        layout.allocate(most // size + 1, torch.device("meta"))


@BOTH
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32), (torch.float16, torch.float8_e5m2), (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)  # fmt: skip
def test_dtypes_without_a_kernel_are_refused(
    kind: type[IPEXBackend], size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=r"is not supported|is not for queries of"):
        kind(spec_of(dtype=dtype, kv_dtype=kv_dtype), size, Card())


def test_the_stand_in_knows_one_layout_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would prove nothing: each kernel is given the cache of the other."""
    flash, paged = (Step(kind, [40], [1], size, spec=spec_in()) for kind, size in KINDS)
    slots = torch.arange(40)
    for step, write in ((flash, xpu_stand_in.reshape_and_cache), (paged, xpu_stand_in.reshape_and_cache_flash)):
        key, value = step.rows[0]
        with pytest.raises(Harm):
            write(key, value, step.cache.keys[0], step.cache.values[0], slots, "auto", 1.0, 1.0)
    monkeypatch.setattr(IPEXBackend, "_check", lambda *_: None)  # octavo itself would refuse it
    for step, other in ((flash, paged), (paged, flash)):
        plan = step.backend.plan(step.batch)
        key, value = step.rows[0]
        with pytest.raises((Harm, RuntimeError)):
            step.backend.attend(step.query, key[-1:], value[-1:], other.cache, plan, 0)
