"""Scales change what the cache holds and nothing of what attention gives: float64 says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.conformance.truth import attention
from octavo.kv.scales import KVScales, is_fp8

HEADS, KV_HEADS, SIZE, TOKENS = 6, 3, 16, 9


def spec(dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype = torch.float8_e4m3fn) -> AttentionSpec:
    return AttentionSpec(
        layers=1, heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, scale=0.25, dtype=dtype, kv_dtype=kv_dtype
    )


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numbers", [1, KV_HEADS])
def test_attention_stays_what_it_is(numbers: int) -> None:
    query = drawn(TOKENS, HEADS, SIZE, seed=0)
    key, value = (drawn(TOKENS, KV_HEADS, SIZE, seed=seed) for seed in (1, 2))
    scales = KVScales.of(torch.tensor([3.7, 0.02, 11.0])[:numbers], torch.tensor([0.3, 29.0, 0.11])[:numbers], spec())
    given = scales.asking(query), *scales.cached(key, value)
    found = scales.restored(attention(*given, None, spec=spec()).float())
    expected = attention(query, key, value, None, spec=spec())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_the_cache_holds_is_divided_by_the_scale_of_its_head() -> None:
    key, value = torch.full((2, KV_HEADS, SIZE), 60.0), torch.full((2, KV_HEADS, SIZE), 8.0)
    scales = KVScales.of(torch.tensor([2.0, 3.0, 5.0]), torch.tensor([4.0]), spec())
    keys, values = scales.cached(key, value)
    assert [float(head.unique()) for head in keys.unbind(1)] == [30, 20, 12]
    assert [float(head.unique()) for head in values.unbind(1)] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_once(dtype: torch.dtype) -> None:
    """The nearest number of the dtype is at most half a step away; rounding the scale too would be a whole one."""
    given = drawn(400, KV_HEADS, SIZE, seed=3).to(dtype)
    scale = torch.tensor([1.0037, 0.7791, 1.2382])
    key, value = KVScales.of(scale, scale, spec(dtype)).cached(given, given)
    expected = given.double() / scale.double()[:, None]
    exponent = expected.abs().clamp(min=torch.finfo(dtype).tiny).frexp().exponent - 1
    half_a_step = torch.finfo(dtype).eps / 2 * 2.0**exponent
    for found in (key, value):
        assert found.dtype == dtype
        assert ((found.double() - expected).abs() <= 1.0001 * half_a_step).all()


@pytest.mark.parametrize(("kv_dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_what_was_not_seen_in_calibration_is_cut_to_the_largest_number(kv_dtype: torch.dtype, largest: float) -> None:
    numbers = torch.tensor([1e6, -1e6, torch.inf, 0.5])
    key = numbers.repeat(1, KV_HEADS, SIZE // 4)
    for cached in KVScales.of(torch.ones(1), torch.ones(1), spec(kv_dtype=kv_dtype)).cached(key, key):
        assert cached[0, 0, :4].tolist() == [largest, -largest, largest, 0.5]
        assert torch.equal(cached.to(kv_dtype).float(), cached)


def test_float16_does_not_become_infinite() -> None:
    scales = KVScales.of(torch.full((1,), 200.0), torch.full((1,), 200.0), spec(torch.float16))
    large = torch.full((1, HEADS, SIZE), 448.0, dtype=torch.float16)
    assert scales.asking(large).unique().tolist() == scales.restored(-large).neg().unique().tolist() == [65504.0]


def test_floats_of_one_byte() -> None:
    assert is_fp8(torch.float8_e4m3fn)
    assert is_fp8(torch.float8_e5m2)
    assert not any(map(is_fp8, (torch.int8, torch.bfloat16, torch.float32)))
