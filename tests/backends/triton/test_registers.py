"""The kernel that decodes from registers, without a GPU: interpreted, against attention in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.stage import Stage
from octavo_triton import launch
from octavo_triton.kernels import registers
from octavo_triton.tuning import IN_REGISTERS, PLAIN, RegisterTile, RegisterTiles
from tests.backends.triton.gluon_interpreter import interpreted
from tests.backends.triton.interpreted import FlashDecoding, Interpreted, Paged

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 20.0, "sinks": True},
}
WIDE = RegisterTiles(RegisterTile(1, 1), RegisterTile(1, 2), 3)
CONTEXTS = (1, 16, 17, 63, 64, 65, 130, 0)


@pytest.fixture(autouse=True)
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NVIDIA GPU, whose kernel is Python."""
    monkeypatch.setattr(launch, "is_nvidia", lambda device: True)
    monkeypatch.setattr(registers, "decode", interpreted(registers.decode))


def staged(backend: type[Interpreted], **changed: Any) -> Stage:
    fields: dict[str, Any] = {
        "head_size": 64, "block_size": 16, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "layers": 1,
        "dirt": Dirt.NAN,
    }  # fmt: skip
    stage = Stage(backend, Configuration(**(fields | changed)), CPU(), 0)
    assert stage.backend._tiles is not None  # type: ignore[attr-defined]
    return stage


def decode(stage: Stage, *, padding: int = 0) -> None:
    """Rows of one new token behind contexts round the edges of tiles and blocks."""
    stage.run(stage.step([(stage.row(length), 1) for length in CONTEXTS], padding=padding))


@pytest.mark.parametrize("backend", [FlashDecoding, Paged])
@pytest.mark.parametrize("features", FEATURES)
def test_features(backend: type[Interpreted], features: str) -> None:
    decode(staged(backend, **FEATURES[features]), padding=2)


@pytest.mark.parametrize(
    ("backend", "changed"),
    [
        (FlashDecoding, {"block_size": 1}),
        (FlashDecoding, {"block_size": 24}),
        (FlashDecoding, {"block_size": 256, "head_size": 128, "heads": 8, "kv_heads": 1}),
        (FlashDecoding, {"dtype": torch.float16, "kv_dtype": torch.float16, "heads": 3, "kv_heads": 1}),
        (FlashDecoding, {"kv_dtype": torch.float8_e4m3fn}),
        (FlashDecoding, {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16}),
        (Paged, {"block_size": 1}),
        (Paged, {"block_size": 64, "head_size": 128}),
        (Paged, {"block_size": 32, "heads": 5, "kv_heads": 5}),
        (Paged, {"kv_dtype": torch.float8_e4m3fn}),
    ],
    ids=str,
)
def test_sizes_and_dtypes(backend: type[Interpreted], changed: dict[str, Any]) -> None:
    decode(staged(backend, **changed))


@pytest.mark.parametrize("backend", [FlashDecoding, Paged])
def test_queries_of_any_size_meet_keys_of_float8(backend: type[Interpreted]) -> None:
    """They are multiplied in float16, which holds neither; heads that share keys differ as much."""
    stage = staged(backend, kv_dtype=torch.float8_e4m3fn, heads=4, kv_heads=1)
    factors = torch.tensor([2.0**-60, 1.0, 2.0**20, 0.0])[:, None]

    def draw_query(*shape: int) -> Tensor:
        return stage.randn(*shape) * factors

    stage.run(stage.step([(stage.row(length), 1) for length in CONTEXTS], draw_query=draw_query))


@pytest.mark.parametrize("backend", [FlashDecoding, Paged])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.bfloat16, torch.float8_e5m2)], ids=str)
def test_small_weights_count(
    backend: type[Interpreted], dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 2 ** -26 are nothing to float16, and all that the answer consists of."""
    dtype, kv_dtype = dtypes
    stage = staged(backend, dtype=dtype, kv_dtype=kv_dtype, heads=2, kv_heads=1)

    def draw_keys(*shape: int) -> Tensor:
        keys = torch.zeros(shape)
        keys[:, 0, :, 0] = 1.0
        return keys

    def draw_values(tokens: int) -> Tensor:
        values = torch.full((1, tokens, 1, stage.spec.head_size), 28_672.0, dtype=torch.float64)
        values[:, :1] = 0
        return values

    def draw_query(*shape: int) -> Tensor:
        return torch.full(shape, 26 * math.log(2) / stage.spec.scale)

    monkeypatch.setattr(stage, "_draw_values", draw_values)
    row = stage.row(15, draw_keys=draw_keys)
    stage.run(stage.step([(row, 1)], draw_query=draw_query, draw_keys=lambda *shape: torch.zeros(shape)))


@pytest.mark.parametrize("backend", [FlashDecoding, Paged])
@pytest.mark.parametrize("rows", [1, 4])
def test_parts_are_joined(backend: type[Interpreted], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than at a time; sinks count once, not once a part."""
    monkeypatch.setattr("octavo_triton.registers._MOST_JOINED", 4)
    stage = staged(backend, sinks=True, window=900)
    step = stage.step([(stage.row(1000 // rows + row), 1) for row in range(rows)])
    stage.run(step)
    work = stage.backend.plan(step.batch).decodes
    assert work.items[:, 4].max() > 4 // rows
    assert not work.scratch.arrived.any(), "the next launch would count on"


def test_many_tokens_are_attended_to_alike() -> None:
    """They are loaded otherwise, by other code."""
    stage = staged(FlashDecoding)
    stage.backend._tiles = replace(IN_REGISTERS, streamed_megabytes=0)  # type: ignore[attr-defined]
    decode(stage)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_size": 80}, {"head_size": 32}, {"dtype": torch.float32, "kv_dtype": torch.float32},
        {"kv_dtype": torch.float32}, {"heads": 9, "kv_heads": 1}, {"batch_invariant": True},
    ],
    ids=str,
)  # fmt: skip
def test_other_layers_take_the_portable_kernel(changed: dict[str, Any]) -> None:
    assert registers_of(FlashDecoding, **changed) is None
    assert registers_of(Paged, **changed) is None


def test_short_upright_blocks_take_the_portable_kernel() -> None:
    """Slots of less than a tile would lie apart."""
    assert registers_of(FlashDecoding, block_size=8) == IN_REGISTERS
    assert registers_of(Paged, block_size=8) is None


def test_wide_upright_blocks_have_tiles_of_their_own() -> None:
    """A warp's tile is a part of each line of memory there."""
    assert registers_of(Paged, block_size=16) == registers_of(FlashDecoding, block_size=64) == IN_REGISTERS
    assert registers_of(Paged, block_size=64) == WIDE


def registers_of(backend: type[Interpreted], block_size: int = 16, **changed: Any) -> Any:
    spec = AttentionSpec(
        layers=1, heads=8, kv_heads=2, head_size=64, scale=0.1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
    )
    spec = replace(spec, **changed)
    layout: Any = backend.layout_type(spec, block_size)
    return launch.register_tiles(spec, layout, torch.device("cpu"), replace(PLAIN, wide=WIDE))
