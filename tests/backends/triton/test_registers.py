"""The kernel that decodes from registers, without a GPU: interpreted, against attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.stage import Stage
from octavo_triton import launch
from octavo_triton.kernels import registers
from octavo_triton.registers import FEW, MANY
from tests.backends.triton.gluon_interpreter import interpreted
from tests.backends.triton.interpreted import FlashDecoding, Interpreted, Paged

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 20.0, "sinks": True},
}
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
@pytest.mark.parametrize("rows", [1, 4])
def test_parts_are_joined(backend: type[Interpreted], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than at a time; sinks count once, not once a part."""
    monkeypatch.setattr("octavo_triton.registers._MOST_JOINED", 4)
    stage = staged(backend, sinks=True, window=900)
    step = stage.step([(stage.row(1000 // rows + row), 1) for row in range(rows)])
    stage.run(step)
    work = stage.backend.plan(step.batch).decodes
    assert work.items[4].max() > 4 // rows
    assert not work.scratch.arrived.any(), "the next launch would count on"


def test_many_tokens_are_attended_to_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded otherwise, by other code."""
    monkeypatch.setattr("octavo_triton.backend._FEW_BYTES", 0)
    decode(staged(FlashDecoding))


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
    assert registers_of(FlashDecoding, block_size=8) == (FEW, MANY)
    assert registers_of(Paged, block_size=8) is None


def registers_of(backend: type[Interpreted], block_size: int = 16, **changed: Any) -> Any:
    spec = AttentionSpec(
        layers=1, heads=8, kv_heads=2, head_size=64, scale=0.1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
    )
    spec = replace(spec, **changed)
    return launch.register_tiles(spec, backend.layout_type(spec, block_size), torch.device("cpu"))  # type: ignore[arg-type]
