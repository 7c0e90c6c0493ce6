"""The tests' own checkpoints: varied enough to show faults, and a counting model that a damaged cache stops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests import checkpoints

VOCAB = 512

# The argument's old name is the one that all supported versions of transformers know.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def load(folder: Path, attention: str = "eager") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


def greedy(model: Any, prompt: Tensor, tokens: int) -> list[int]:
    mask = torch.ones_like(prompt)
    output = model.generate(
        prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(output[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize("architecture", checkpoints.ARCHITECTURES)
def test_greedy_output_varies_and_depends_on_far_tokens(architecture: str, tmp_path: Path) -> None:
    model = load(checkpoints.make(architecture, tmp_path))
    assert model.dtype == torch.float32
    prompt = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    other = prompt.clone()
    other[0, 0] = (prompt[0, 0] + 1) % 256
    output = greedy(model, prompt, 32)
    assert len(set(output)) > 8
    assert output != greedy(model, other, 32)


def test_same_seed_same_weights(tmp_path: Path) -> None:
    folders = [checkpoints.make("llama", tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    config = load(checkpoints.make("mistral", tmp_path, sliding_window=7, num_hidden_layers=1)).config
    assert (config.sliding_window, config.num_hidden_layers) == (7, 1)


def test_byte_tokenizer_returns_any_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.make("llama", tmp_path))
    text = "  naïve 日本語 🎉\n\tx . y"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(["<end>", "<begin>", "<pad>"]) == [256, 257, 258]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(checkpoints.counting_model(tmp_path_factory.mktemp("counting"), VOCAB), "sdpa")


def counted(start: int, tokens: int) -> list[int]:
    return [(start + index) % VOCAB for index in range(tokens)]


@pytest.mark.parametrize(("start", "prompt"), [(0, 1), (100, 3), (300, 37), (511, 2)])
def test_counts_for_hundreds_of_tokens(counter: Any, start: int, prompt: int) -> None:
    new = 400
    output = greedy(counter, torch.tensor([counted(start, prompt)]), new)
    assert output == counted(start + prompt, new)


def filled_cache(model: Any, start: int, tokens: int) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([counted(start, tokens)]), past_key_values=cache)
    return cache


def next_token(model: Any, cache: Any, token: int) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].argmax())


def test_counting_reads_the_cache_as_it_is(counter: Any) -> None:
    assert next_token(counter, filled_cache(counter, 40, 200), 240) == 241


@pytest.mark.parametrize("position", [0, 1, 15, 16, 100, 198, 199])
@pytest.mark.parametrize("fault", ["stranger", "zero", "key alone zero", "token twice", "other layer"])
def test_one_damaged_position_stops_the_counting(counter: Any, position: int, fault: str) -> None:
    cache = filled_cache(counter, 40, 200)
    first, layer = cache.layers
    keys, values = layer.keys, layer.values
    if fault == "stranger":
        values[:, :, position] = filled_cache(counter, 300, 200).layers[1].values[:, :, position]
    elif fault == "token twice":
        values[:, :, position] = values[:, :, (position + 1) % 200]
    elif fault == "other layer":
        values[:, :, position] = first.values[:, :, position]
    else:
        keys[:, :, position] = 0
        values[:, :, position] *= fault == "key alone zero"
    assert next_token(counter, cache, 240) != 241


def test_a_position_too_many_or_too_few_stops_the_counting(counter: Any) -> None:
    longer, shorter = filled_cache(counter, 40, 200), filled_cache(counter, 40, 200)
    for layer in longer.layers:
        layer.keys, layer.values = (nn.functional.pad(part, (0, 0, 0, 1)) for part in (layer.keys, layer.values))
    for layer in shorter.layers:
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
    assert next_token(counter, longer, 240) != 241
    assert next_token(counter, shorter, 240) != 241


def test_a_block_of_another_request_stops_the_counting(counter: Any) -> None:
    cache, other = filled_cache(counter, 40, 200), filled_cache(counter, 300, 200)
    for layer, stranger in zip(cache.layers, other.layers, strict=True):
        layer.keys[:, :, 32:48] = stranger.keys[:, :, 32:48]
        layer.values[:, :, 32:48] = stranger.values[:, :, 32:48]
    assert next_token(counter, cache, 240) != 241


def test_counting_tokens_are_numbers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.counting_model(tmp_path, VOCAB))
    assert tokenizer.encode("500 501 7") == [500, 501, 7]
    assert tokenizer.decode([500, 501, 7]) == "500 501 7"
