"""Every backend that is installed says the same tokens in 16 bits: those that transformers' own `generate` says.

OCTAVO_TEST_DEVICE=cuda runs it on a GPU. No token is a close call, so there is nothing to forgive.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.attention.candidates import survey
from octavo.attention.contract import AttentionSpec
from octavo.attention.select import choose_device
from octavo.plugins import plugins
from tests.conftest import Note
from tests.copying_model import BEGIN, VOCABULARY, continuation, copying_model
from tests.engine.harness import DEVICE, answer, generate, load_reference, soil

TOKENS = 20
LENGTHS = ((1, 1), (2, 1), (6, 5), (15, 3), (31, 30), (60, 20), (100, 70), (250, 200), (250, 40))
"""Of prompts: tokens before one begins anew, and from there on."""
SHAPES = {"bfloat16": (128, 1), "float16": (64, 2), "float32": (64, 2)}
"""Head size, and query heads to a key head. In 32 bits for backends that have no others."""


def _prompts() -> list[list[int]]:
    chance = random.Random(0)
    prompts = []
    for period, again in LENGTHS:
        once = chance.sample(range(BEGIN + 1, VOCABULARY), period)
        prompts.append([BEGIN, *once, *once[:again]])
    return prompts


PROMPTS = _prompts()
ANSWERS = [continuation(prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=sorted({*SHAPES.values()}), ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copying_model(tmp_path_factory.mktemp("copying"), *request.param)


def margins(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """By how much transformers prefers each token of an answer to all others."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    said = logits.gather(1, torch.tensor(answer)[:, None])
    return torch.as_tensor(said[:, 0] - logits.scatter(1, torch.tensor(answer)[:, None], -torch.inf).amax(-1))


def test_transformers_says_them_by_a_wide_margin_and_only_with_its_whole_attention(model: Path) -> None:
    reference = load_reference(model).double()
    for prompt, expected in zip(PROMPTS, ANSWERS, strict=True):
        assert generate(reference, prompt, TOKENS) == expected
        assert margins(reference, prompt, expected).min() > 2
    long, said = PROMPTS[-1], ANSWERS[-1]
    for place in range(TOKENS):  # it reads the next token from one key alone
        at = long.index(said[place])
        other = [*long[:at], BEGIN, *long[at + 1 :]]
        assert margins(reference, other, said)[place] < -2
    for layer in reference.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    assert max(margins(reference, *pair).max() for pair in zip(PROMPTS, ANSWERS, strict=True)) < 2


def _cases() -> list[tuple[str, str]]:
    """Backends, each with the dtypes of 16 bits that it has, or else with float32."""
    device = choose_device(DEVICE, plugins())
    found: list[tuple[str, str]] = []
    for dtype, (head_size, group) in SHAPES.items():
        kind, key_heads = getattr(torch, dtype), VOCABULARY // head_size
        spec = AttentionSpec(
            layers=2, heads=key_heads * group, kv_heads=key_heads, head_size=head_size, scale=head_size**-0.5,
            dtype=kind, kv_dtype=kind,
        )  # fmt: skip
        able = [one.name for one in survey([spec], device, plugins=plugins()) if not one.reasons]
        found += [(name, dtype) for name in able if dtype != "float32" or name not in {name for name, _ in found}]
    return found


@pytest.mark.parametrize(("attention", "dtype"), _cases())
def test_all_backends_say_them(attention: str, dtype: str, tmp_path: Path, note: Note) -> None:
    llm = LLM(
        copying_model(tmp_path, *SHAPES[dtype]), attention=attention, dtype=dtype, device=DEVICE, compile=False,
        max_batch_total_tokens=4096, max_batch_prefill_tokens=64, max_batch_size=8, progress=False,
    )  # fmt: skip
    soil(llm.engine)
    for seed in range(2):  # the second time from the cache
        found = answer(llm.engine, PROMPTS, TOKENS, arrival="random", seed=seed)
        assert found.tokens == ANSWERS
    graphs = llm.engine.runner.graphs
    note(f"{attention}: {graphs.replays if graphs is not None else 0} captured steps")
