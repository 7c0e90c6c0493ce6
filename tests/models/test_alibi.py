"""BLOOM and MPT: the slopes that their layers ask for, and what of them is not served. Their tokens: tests/engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.attention.wish import BackendUnavailable
from octavo.models.bridge import UnsupportedModel, groups, inspect
from octavo.models.load import load
from octavo.models.pack import pack
from octavo_reference.backend import ReferenceBackend
from tests import checkpoints
from tests.distributions import Offers, plugins_of


def slopes(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[float, ...] | None:
    """Of a model whose layers all attend alike."""
    ((spec, _),) = groups(inspect(load(folder, dtype=dtype, progress=False).model), dtype, dtype)
    return spec.alibi_slopes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
@pytest.mark.parametrize(
    ("heads", "halvings"),
    [
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes_are_the_papers_in_any_dtype(
    architecture: str, heads: int, halvings: list[float], dtype: torch.dtype, tmp_path: Path
) -> None:
    """2^(-8 h / heads); the heads beyond a power of two have every other slope of twice as many heads."""
    folder = checkpoints.make(architecture, tmp_path, num_attention_heads=heads)
    assert slopes(folder, dtype) == pytest.approx([2.0**-halving for halving in halvings], rel=1e-6)


def test_mpts_largest_bias_is_its_configurations(tmp_path: Path) -> None:
    folder = checkpoints.make("mpt", tmp_path, num_attention_heads=4, attn_config={"alibi_bias_max": 16})
    assert slopes(folder) == pytest.approx([2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16])


def test_mpt_without_position_biases_is_refused(tmp_path: Path) -> None:
    """transformers' MPT adds them all the same."""
    with pytest.raises(UnsupportedModel, match="MptForCausalLM does not call attention through"):
        load(checkpoints.make("mpt", tmp_path, attn_config={"alibi": False}), progress=False)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type=multiquery_attention"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln=True"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm=True"),
        ({"no_bias": False}, "no_bias=False"),
        ({"norm_type": "rmsnorm"}, "norm_type=rmsnorm"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale=inv_sqrt_d_model"),
    ],
)
def test_what_transformers_mpt_passes_over_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"MptForCausalLM passes over its {told}$"):
        load(checkpoints.make("mpt", tmp_path, **settings), progress=False)


@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
def test_with_another_attention_function_layers_are_transformers_own(architecture: str, tmp_path: Path) -> None:
    model = load(checkpoints.make(architecture, tmp_path), attention="eager", progress=False).model
    with pytest.raises(UnsupportedModel, match=f"{architecture} has 3 layers, 0 of which call"):
        inspect(model)


class Unbiased(ReferenceBackend):
    name = "unbiased"
    platform = "test"
    capabilities = replace(ReferenceBackend.capabilities, features=frozenset({"window"}))


def test_a_backend_without_biases_is_refused(tmp_path: Path) -> None:
    plugins = plugins_of(Offers([Unbiased], []))
    with pytest.raises(BackendUnavailable, match="the model needs alibi: it supports window"):
        LLM(checkpoints.make("bloom", tmp_path), attention="unbiased", device="cpu", plugins=plugins, progress=False)


def test_blooms_products_in_slices_are_whole(tmp_path: Path) -> None:
    """Sliced weights are not those that were reordered."""
    asked: dict[str, Any] = {"pretraining_tp": 2, "slow_but_exact": True}
    model = load(checkpoints.make("bloom", tmp_path, **asked), progress=False).model
    assert pack(model)
    assert len(inspect(model)) == 3


def test_bloom_was_trained_on_2048_tokens(tmp_path: Path) -> None:
    folder = checkpoints.make("bloom", tmp_path, seq_length=None)
    assert load(folder, progress=False).max_position == 2048
