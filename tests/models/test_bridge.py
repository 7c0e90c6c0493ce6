"""What the layers of a model ask of attention, as its own configuration says it, and which models are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, PreTrainedModel

from octavo.kv.scales import KVScales
from octavo.models import bridge
from octavo.models.bridge import AttentionCall, UnsupportedModel, groups, inspect, sinks
from octavo.models.load import load, load_random
from tests import checkpoints


def inspected(architecture: str, folder: Path, **overrides: Any) -> tuple[PreTrainedModel, list[AttentionCall]]:
    model = load(checkpoints.make(architecture, folder, **overrides), progress=False).model
    return model, inspect(model)


@pytest.mark.parametrize("architecture", checkpoints.ARCHITECTURES)
def test_each_layer_is_asked_once_and_its_heads_are_the_configurations(architecture: str, tmp_path: Path) -> None:
    model, calls = inspected(architecture, tmp_path)
    config = model.config
    assert len(calls) == config.num_hidden_layers
    assert len({call.module for call in calls}) == len(calls)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = heads if architecture == "gpt2" else config.num_key_value_heads
    assert {(call.heads, call.kv_heads, call.head_size) for call in calls} == {(heads, kv_heads, size)}


def test_layers_that_attend_alike_are_one_group(tmp_path: Path) -> None:
    _, calls = inspected("llama", tmp_path)
    ((spec, members),) = groups(calls, torch.float32, torch.bfloat16)
    assert members == [0, 1, 2]
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_size) == (3, 4, 2, 16)
    assert spec.scale == pytest.approx(16**-0.5)
    assert (spec.dtype, spec.kv_dtype) == (torch.float32, torch.bfloat16)
    assert (spec.window, spec.softcap, spec.sinks) == (None, None, False)
    assert sinks(calls, members) is None


def test_a_window_in_every_layer(tmp_path: Path) -> None:
    _, calls = inspected("mistral", tmp_path)
    ((spec, members),) = groups(calls, torch.float32, torch.float32)
    assert (spec.window, members) == (24, [0, 1, 2])


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "gpt_oss"])
def test_windowed_and_full_layers_are_a_group_each(architecture: str, tmp_path: Path) -> None:
    model, calls = inspected(architecture, tmp_path)
    (windowed, first), (full, second) = groups(calls, torch.float32, torch.float32)
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (windowed.window, first) == (24, [0, 2])
    assert (full.window, second) == (None, [1, 3])
    assert windowed.layers == full.layers == 2


def test_soft_cap_and_scale_are_the_configurations(tmp_path: Path) -> None:
    _, gemma2 = inspected("gemma2", tmp_path / "gemma2", attn_logit_softcapping=7.0, query_pre_attn_scalar=9)
    _, gemma3 = inspected("gemma3_text", tmp_path / "gemma3", query_pre_attn_scalar=25)
    _, granite = inspected("granite", tmp_path / "granite", attention_multiplier=0.3)
    for calls, softcap, scale in ((gemma2, 7.0, 1 / 3), (gemma3, None, 1 / 5), (granite, None, 0.3)):
        for spec, _ in groups(calls, torch.float32, torch.float32):
            assert spec.softcap == softcap
            assert spec.scale == pytest.approx(scale)


def test_sinks_are_each_layers_parameters(tmp_path: Path) -> None:
    model, calls = inspected("gpt_oss", tmp_path)
    (windowed, first), (full, second) = groups(calls, torch.float32, torch.float32)
    assert windowed.sinks
    assert full.sinks
    for members in (first, second):
        held = sinks(calls, members)
        expected = [model.get_parameter(f"model.layers.{number}.self_attn.sinks") for number in members]
        assert held is not None
        assert held.dtype == torch.float32
        assert torch.equal(held, torch.stack([row.detach() for row in expected]))


def test_sinks_in_half_precision_are_given_in_full(tmp_path: Path) -> None:
    folder = checkpoints.make("gpt_oss", tmp_path)
    calls = inspect(load(folder, dtype=torch.bfloat16, progress=False).model)
    held = sinks(calls, [0, 2])
    assert held is not None
    assert (held.dtype, held.shape) == (torch.float32, (2, 4))


def test_a_model_can_be_inspected_again_after_it_was_bound(tmp_path: Path) -> None:
    model, calls = inspected("llama", tmp_path)
    bridge.bind(calls, [0, 1, 2], bridge.AttentionGroup(backend=object(), cache=None))  # type: ignore[arg-type]
    again = inspect(model)
    assert [call.module for call in again] == [call.module for call in calls]


def test_each_layer_is_bound_with_its_own_scales(tmp_path: Path) -> None:
    _, calls = inspected("gemma2", tmp_path)
    alike = groups(calls, torch.float32, torch.float8_e4m3fn)
    one = torch.ones(1)
    scales = {number: KVScales.of(one, one, spec) for spec, members in alike for number in members if number != 3}
    for _, members in alike:
        bridge.bind(calls, members, bridge.AttentionGroup(backend=object(), cache=None), scales)  # type: ignore[arg-type]
    bound = [call.module.__dict__[bridge._BOUND].scales for call in calls]
    assert bound == [scales[0], scales[1], scales[2], None]


# Models that would be served wrongly


def changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """From now on layers pass something else to attention than they would."""
    mask = changes.pop("mask", None)
    value_size = changes.pop("value_size", None)

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        return bridge.attention(module, query, key, value[..., :value_size], mask, **(given | changes))

    monkeypatch.setitem(AttentionInterface._global_mapping, bridge.ATTENTION_NAME, attention)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"mask": torch.zeros(1, 1, 2, 2)},
            "LlamaAttention masks attention in a way of its own (mask of shape (1, 1, 2, 2))",
        ),
        ({"is_causal": False}, "LlamaAttention is not causal: only decoder-only language models"),
        ({"value_size": 8}, "keys of size 16 and values of size 8"),
        (
            {"position_bias": torch.zeros(1, 4, 2, 2)},
            "passes position_bias (1, 4, 2, 2) to attention, which octavo would ignore",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_layer_that_asks_for_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    model = load(checkpoints.make("llama", tmp_path), progress=False).model
    changed(monkeypatch, **changes)
    with pytest.raises(UnsupportedModel) as refusal:
        inspect(model)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("name", ["position_ids", "cache_position", "input_ids"])
def test_tensors_that_change_nothing_are_no_reason(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoints.make("llama", tmp_path), progress=False).model
    changed(monkeypatch, **{name: torch.zeros(1, 2)})
    assert len(inspect(model)) == 3


def test_a_model_that_does_not_call_the_attention_function_in_every_layer_is_refused(tmp_path: Path) -> None:
    model = load(checkpoints.make("llama", tmp_path), progress=False).model
    layers: Any = model.get_submodule("model.layers")
    layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match="llama has 3 layers, 2 of which call"):
        inspect(model)


def test_a_model_that_is_not_given_the_attention_function_is_refused(tmp_path: Path) -> None:
    model = load(checkpoints.make("llama", tmp_path), attention="sdpa", progress=False).model
    with pytest.raises(UnsupportedModel, match="llama has 3 layers, 0 of which call"):
        inspect(model)


@pytest.mark.parametrize(("kind", "window"), [("sliding_attention", None), ("full_attention", 24)])
def test_a_layer_that_asks_for_another_window_than_its_kind_is_refused(
    kind: str, window: int | None, tmp_path: Path
) -> None:
    model = load(checkpoints.make("gemma2", tmp_path), progress=False).model
    layers: Any = model.get_submodule("model.layers")
    number = model.config.layer_types.index(kind)
    layers[number].self_attn.sliding_window = window
    with pytest.raises(UnsupportedModel, match=f"layer {number} of gemma2 is of kind {kind} .*24.* window {window}"):
        inspect(model)


def test_configurations_alone_can_be_inspected(tmp_path: Path) -> None:
    """Random weights, as benchmarks use them."""
    config = AutoConfig.from_pretrained(checkpoints.make("qwen3", tmp_path))
    calls = inspect(load_random(config, dtype=torch.bfloat16).model)
    assert len(calls) == 3
