"""A captured model computes what the model does; what cannot be captured says why and runs as it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.kv.scales import KVScales
from octavo.models import bridge, compile
from octavo.models.capture import NotCapturable, Piece, capture, eager
from octavo.models.compile import CompileFailed, compiled
from octavo.models.load import load
from octavo.models.pack import pack
from octavo.settings import SettingsError
from tests import checkpoints

MIXTURES = ("gpt_oss", "qwen3_moe")
DENSE = [name for name in checkpoints.ARCHITECTURES if name not in MIXTURES]


class Dense:
    """In the place of a backend and its layout: causal attention among the step's own tokens."""

    def write(self, cache: object, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Nothing is kept."""

    @property
    def layout(self) -> Dense:
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: object, plan: object, layer: int) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


def bound(architecture: str, folder: Path, packed: bool = True, scaled: bool = False) -> PreTrainedModel:
    """`scaled`: as for an fp8 cache."""
    model = load(checkpoints.make(architecture, folder), dtype=torch.float32, progress=False).model
    if packed:
        pack(model)
    calls = bridge.inspect(model)
    backend: Any = Dense()
    bridge.bind(calls, range(len(calls)), bridge.AttentionGroup(backend, None), drawn_scales(calls) if scaled else None)
    return model


def drawn_scales(calls: Sequence[bridge.AttentionCall]) -> dict[int, KVScales]:
    """In even layers one scale for all heads, in the others one for each."""
    ((spec, members),) = bridge.groups(calls, torch.float32, torch.float8_e4m3fn)
    drawn = torch.rand(len(members), 2, spec.kv_heads, generator=torch.Generator().manual_seed(0)) + 0.1
    counts = [spec.kv_heads if layer % 2 else 1 for layer in members]
    return {
        layer: KVScales.of(key[:count], value[:count], spec)
        for layer, (key, value), count in zip(members, drawn, counts, strict=True)
    }


@pytest.fixture
def recorded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as they were recorded: what is tested is the capture, not the compiler."""
    monkeypatch.setattr(compile, "_inductor", lambda piece, *_: compile._as_recorded(piece))


def inputs(tokens: int, rows: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 250, (1, tokens), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(5, 5 + tokens)[None], torch.tensor(rows, dtype=torch.int64)


SHAPES = [(1, [0]), (1, []), (2, [1]), (2, []), (3, [0, 1, 2]), (7, [2, 6]), (40, [39]), (40, [0, 20, 39])]


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.usefixtures("recorded_only")
@torch.inference_mode()
def test_a_capture_computes_what_the_model_does_for_any_number_of_tokens(architecture: str, tmp_path: Path) -> None:
    model = bound(architecture, tmp_path)
    plain, captured = eager(model), compiled(model)
    for tokens, rows in SHAPES:
        expected, found = plain(*inputs(tokens, rows)), captured(*inputs(tokens, rows))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on_gpu", [False, True])
@torch.inference_mode()
def test_compiled_pieces_compute_it_too_and_again(
    on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_gpu`: compiled as for a GPU, though on this CPU; the other time with the scales of an fp8 cache."""
    monkeypatch.setattr(compile, "_on_gpu", lambda model: on_gpu)
    model = bound("llama", tmp_path, packed=not on_gpu, scaled=not on_gpu)
    plain, captured = eager(model), compiled(model)
    for seed in range(2):
        for tokens, rows in SHAPES:
            expected, found = (forward(*inputs(tokens, rows, seed)) for forward in (plain, captured))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("recorded_only")
@torch.inference_mode()
def test_scales_change_nothing_where_nothing_is_rounded(tmp_path: Path) -> None:
    """`Dense` keeps no cache."""
    plain, model = eager(bound("llama", tmp_path / "plain")), bound("llama", tmp_path / "scaled", scaled=True)
    scaled = (eager(model), compiled(model))
    for tokens, rows in SHAPES:
        expected = plain(*inputs(tokens, rows))
        for forward in scaled:
            torch.testing.assert_close(forward(*inputs(tokens, rows)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("recorded_only")
@torch.inference_mode()
def test_more_than_32_bits_can_count_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest value has so many elements a token, logits so many a row: beyond that compiled code would overflow."""
    model = bound("llama", tmp_path, packed=False)
    recorded = capture(model)
    tokens, rows = (recorded.tokens[at].meta["val"].shape[-1].node.expr for at in (0, 2))
    config = model.config
    assert compile._most(recorded, rows) == (2**31 - 1) // config.vocab_size
    assert compile._most(recorded, tokens) <= (2**31 - 1) // config.intermediate_size
    calls: list[int] = []
    plain = eager(model)
    monkeypatch.setattr(compile, "_most", lambda recorded, size: 3)

    def counting(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        calls.append(ids.shape[1])
        return plain(ids, positions, rows)

    monkeypatch.setattr(compile, "eager", lambda model: counting)
    forward = compiled(model)
    for count, wanted in ((2, [1]), (3, [0, 1, 2]), (4, [1])):
        torch.testing.assert_close(forward(*inputs(count, wanted)), plain(*inputs(count, wanted)))
    assert calls == [4]


@pytest.mark.parametrize("scaled", [False, True])
def test_layers_that_do_the_same_are_one_piece(scaled: bool, tmp_path: Path) -> None:
    """Whatever their scales are, which are arguments as weights are."""
    steps = capture(bound("llama", tmp_path, scaled=scaled)).steps
    pieces = [step for step in steps if isinstance(step, Piece)]
    assert len(pieces) == 3 + 1
    assert len(steps) == 3 + len(pieces)
    first, *middle, last = (piece.signature() for piece in pieces)
    assert len(set(middle)) == 1
    assert len({first, middle[0], last}) == 3


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_is_not_captured_and_runs_all_the_same(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("COMPILE")
    folder = checkpoints.make(architecture, tmp_path)
    arguments: dict[str, Any] = {"dtype": "float32", "max_batch_total_tokens": 256, "device": "cpu", "progress": False}
    with pytest.raises(SettingsError, match="Unset COMPILE"):
        LLM(folder, compile=True, **arguments)
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, **arguments)
    assert "the model runs uncompiled" in caplog.text
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    assert len(output.completions[0].token_ids) == 2


def test_a_model_that_branches_on_the_number_of_tokens_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bound("llama", tmp_path)
    inner = model.forward

    def forward(input_ids: Tensor, **others: Any) -> Any:
        return inner(input_ids=input_ids if input_ids.shape[1] < 10 else input_ids.flip(1), **others)

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(NotCapturable, match="computes differently"):
        capture(model)


def test_a_model_that_branches_on_values_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bound("llama", tmp_path)
    inner = model.forward

    def forward(position_ids: Tensor, **others: Any) -> Any:
        return inner(position_ids=position_ids % 5 if position_ids.max() > 4 else position_ids, **others)

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(NotCapturable):
        capture(model)


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(*_: object) -> None:
        raise OSError("the compiler fell over")

    monkeypatch.setattr(compile, "_inductor", fail)
    return "the compiler fell over"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, broken_compiler: str) -> None:
    model = bound("llama", tmp_path)
    with pytest.raises(CompileFailed, match=broken_compiler):
        compiled(model)
