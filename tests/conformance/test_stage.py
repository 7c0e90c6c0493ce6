"""Whatever rows a step has, a backend that is right is told to be right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.stage import Row, Stage
from octavo_cpu.backend import FlashDecodingBackend
from octavo_reference.backend import ReferenceBackend

STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=5), min_size=1, max_size=3
)
"""Of each step the rows: keys of earlier steps, and new tokens."""


@pytest.mark.parametrize("backend", [FlashDecodingBackend, ReferenceBackend])
@settings(deadline=None, max_examples=15)
@given(
    steps=STEPS,
    block_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(2, 2), (6, 2), (5, 1)]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.floats(0.5, 50),
    sinks=st.booleans(),
    alibi=st.booleans(),
    dirt=st.sampled_from(Dirt),
    seed=st.integers(0, 2**20),
)
def test_any_rows(
    backend: type[AttentionBackend],
    steps: list[list[tuple[int, int]]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    alibi: bool,
    dirt: Dirt,
    seed: int,
) -> None:
    """New ones come, and all that were there get a token more."""
    configuration = Configuration(
        heads=heads[0], kv_heads=heads[1], head_size=16, block_size=block_size, dtype=torch.float32,
        kv_dtype=torch.float32, window=window, softcap=softcap, sinks=sinks, dirt=dirt, layers=1,
        alibi=alibi and "alibi" in backend.capabilities.features,
    )  # fmt: skip
    stage = Stage(backend, configuration, CPU(), seed)
    for rows in steps:
        old: list[tuple[Row, int]] = [(row, 1) for row in stage.rows]
        stage.run(stage.step(old + [(stage.row(held), new) for held, new in rows]))
