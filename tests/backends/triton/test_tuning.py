"""Tiles fit: into shared memory, round all query heads of a key head, and into what products of tiles take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo_triton.tuning import PLAIN, DecodeTile, PrefillTile, Tuning, fitted

POWERS = st.integers(4, 8).map(lambda exponent: 1 << exponent)
DECODES = st.builds(
    DecodeTile,
    keys=POWERS,
    warps=st.sampled_from([1, 2, 4]),
    stages=st.integers(1, 6),
    per_processor=st.integers(1, 8),
    uneven=st.integers(1, 8),
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
