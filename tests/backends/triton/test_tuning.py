"""Tiles fit: into shared memory, round all query heads of a key head, and into what products of tiles take."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU
from octavo_triton.tuning import PLAIN, TUNABLES, DecodeTile, PrefillTile, RegisterTile, Tuning, fitted
from tests.backends.triton.interpreted import FlashDecoding

POWERS = st.integers(4, 8).map(lambda exponent: 1 << exponent)
DECODES = st.builds(
    DecodeTile,
    keys=POWERS,
    warps=st.sampled_from([1, 2, 4]),
    stages=st.integers(1, 6),
    per_processor=st.integers(1, 8),
)
TUNINGS = st.builds(
    Tuning,
    decode=DECODES,
    prefill=st.builds(
        PrefillTile, queries=POWERS, keys=POWERS, warps=st.sampled_from([4, 8]), stages=st.integers(1, 4)
    ),
)


@given(
    tuning=TUNINGS,
    dims=POWERS,
    itemsize=st.sampled_from([2, 4]),
    group=st.integers(1, 64),
    shared_bytes=st.sampled_from([48 << 10, 99 << 10, 227 << 10]),
)
def test_tiles_fit(tuning: Tuning, dims: int, itemsize: int, group: int, shared_bytes: int) -> None:
    found = fitted(tuning, dims, itemsize, group, shared_bytes)
    for name in ("decode", "prefill"):
        tile, wished = getattr(found, name), getattr(tuning, name)
        assert tile.keys & (tile.keys - 1) == 0
        assert tile.warps & (tile.warps - 1) == 0
        assert 16 <= tile.keys <= wished.keys
        assert tile.stages == 1 or 2 * tile.keys * dims * itemsize * tile.stages <= shared_bytes
        assert tile.stages == wished.stages or tile.keys == 16
    assert found.prefill.queries & (found.prefill.queries - 1) == 0
    assert found.prefill.queries >= max(16, group)


def test_what_fits_is_left_as_it_is() -> None:
    assert fitted(PLAIN, dims=128, itemsize=2, group=4, shared_bytes=227 << 10) == PLAIN


def test_options_change_what_they_name() -> None:
    found = PLAIN.with_options({"decode": {"keys": 32, "per_processor": 9}})
    assert (found.decode.keys, found.decode.per_processor, found.decode.warps) == (32, 9, PLAIN.decode.warps)
    assert found.prefill == PLAIN.prefill
    for phase, shapes in TUNABLES.items():
        for shape in shapes:
            changed = PLAIN.with_options({phase: shape})
            if "registers" in shape:
                tile = RegisterTile(shape["warps"], shape["per_processor"])
                assert (
                    [changed.registers.few, changed.registers.many]
                    == [tile, tile]
                    == [changed.wide.few, changed.wide.many]
                )
                assert (changed.decode, changed.prefill) == (PLAIN.decode, PLAIN.prefill)
            else:
                assert {name: getattr(getattr(changed, phase), name) for name in shape} == shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode": 3}, 'option decode is 3, it must be an object, e.g. {"keys": 64}'),
        (
            {"decode": {"key": 3}},
            "option decode has key, it takes keys, warps, stages, waves_per_eu, matrix_instr_nonkdim, per_processor",
        ),
        ({"decode": {"registers": 1, "keys": 3}}, "option decode has keys, it takes warps, per_processor"),
        ({"decode": {"registers": 0}}, "option decode has registers 0 and warps 2, registers must be 1 or left out"),
        (
            {"decode": {"registers": 1, "warps": 8}},
            "option decode has registers 1 and warps 8, registers must be 1 or left out, and warps with it 1, 2, 4",
        ),
        ({"prefill": {"registers": 1, "warps": 2}}, "option prefill has registers, it takes keys"),
        ({"prefill": {"keys": 0}}, "option prefill has keys 0, it must be a whole number at least 1"),
        ({"prefill": {"keys": True}}, "option prefill has keys True, it must be"),
        ({"prefill": {"keys": "64"}}, "option prefill has keys '64', it must be"),
    ],
)
def test_options_that_are_none_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PLAIN.with_options(given)


def test_a_backend_takes_shapes_and_nothing_else() -> None:
    spec = AttentionSpec(
        layers=1, heads=2, kv_heads=1, head_size=32, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
    )  # fmt: skip
    assert FlashDecoding(spec, 16, CPU(), {"decode": {"keys": 64}}).tuning.decode.keys == 64
    with pytest.raises(ValueError, match="takes no such option: decoding"):
        FlashDecoding(spec, 16, CPU(), {"decoding": {"keys": 64}})
