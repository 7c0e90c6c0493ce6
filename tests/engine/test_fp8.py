"""A model whose keys an fp8 cache cannot hold answers as transformers does once its checkpoint has scales."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from tests import checkpoints
from tests.conformance.minimal import MinimalBackend
from tests.distributions import Offers, plugins_of
from tests.engine.harness import load_reference

LAYERS, GROUP, SIZE = 3, 2, 16
PROMPT = torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NEAR, FAR = 0.3, 2.0
"""Mean distance of log-probabilities: what fp8 rounds away in a random model, and that of answers that mean nothing."""
E4M3 = "fp8_e4m3fn"


class OneByte(MinimalBackend):
    """Reads all keys and values from the cache, this step's too."""

    name = "one-byte"
    capabilities = replace(MinimalBackend.capabilities, kv_dtypes=(torch.float8_e4m3fn, torch.float32))


def enlarged(folder: Path, factors: tuple[float, float]) -> Path:
    """A model that computes what it did with keys and values of its heads larger by these factors.

    Its attention is flat: where it is peaked, a random model makes much of the rounding of fp8.
    """
    file = checkpoints.make("llama", folder) / "model.safetensors"
    weights = load_file(file)
    keys = torch.tensor(factors).repeat_interleave(SIZE)
    queries = torch.tensor(factors).repeat_interleave(GROUP * SIZE)
    for layer in range(LAYERS):
        query, key, value, out = (weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkvo")
        query /= 10 * queries[:, None]
        key *= keys[:, None]
        value *= keys[:, None]
        out /= 5 * queries
    save_file(weights, file, {"format": "pt"})
    return folder


def truth(folder: Path) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """transformers' log-probabilities of the prompt's tokens, and the largest key and value of each layer's heads."""
    with torch.inference_mode():
        output = load_reference(folder)(torch.tensor([PROMPT]), use_cache=True)
    chosen = output.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    layers = output.past_key_values.layers
    return chosen, [(layer.keys[0].abs().amax((1, 2)), layer.values[0].abs().amax((1, 2))) for layer in layers]


def calibrate(folder: Path, largest: list[tuple[Tensor, Tensor]], each_head: bool) -> None:
    """Write scales as calibration makes them: the largest number seen is the largest of e4m3."""
    file = folder / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": (seen if each_head else seen.max()) / 448
        for layer, both in enumerate(largest)
        for part, seen in zip("kv", both, strict=True)
    }
    save_file(load_file(file) | scales, file, {"format": "pt"})


def distance(folder: Path, expected: Tensor, **settings: Any) -> float:
    llm = LLM(
        folder, attention="one-byte", device="cpu", dtype="float32", block_size=16, max_batch_total_tokens=256,
        plugins=plugins_of(Offers([OneByte])), progress=False, **settings,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([PROMPT], params, progress=False)
    assert output.prompt_logprobs is not None
    found = torch.tensor([token.logprob for token in output.prompt_logprobs if token is not None])
    return float((found - expected).abs().mean())


def test_keys_in_the_thousands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = enlarged(tmp_path, (1000.0, 1000.0))
    expected, largest = truth(folder)
    assert min(float(seen.min()) for both in largest for seen in both) > 5000
    assert distance(folder, expected, kv_cache_dtype=E4M3) > FAR
    calibrate(folder, largest, each_head=False)
    with caplog.at_level(logging.INFO, "octavo"):
        assert distance(folder, expected, kv_cache_dtype=E4M3) < NEAR
    assert "keys and values of 3 of 3 layers are scaled as the checkpoint says, one a layer" in caplog.text
    caplog.clear()
    assert distance(folder, expected) < 1e-4
    assert "scale" not in caplog.text


def test_heads_of_which_one_is_large_and_one_is_small(tmp_path: Path) -> None:
    """One scale for both leaves nothing of the small one."""
    folder = enlarged(tmp_path, (1000.0, 0.001))
    expected, largest = truth(folder)
    calibrate(folder, largest, each_head=False)
    assert distance(folder, expected, kv_cache_dtype=E4M3) > FAR
    calibrate(folder, largest, each_head=True)
    assert distance(folder, expected, kv_cache_dtype=E4M3) < NEAR
