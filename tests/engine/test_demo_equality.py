"""The demo model's greedy tokens are those of transformers' own `generate`, whatever the engine goes through.

OCTAVO_FULL_MATRIX=1 takes every block size through every way of running, with more prompts and longer answers;
OCTAVO_DEMO_PROMPTS and OCTAVO_DEMO_TOKENS set how many prompts there are, and how many new tokens each gets.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from octavo.kv.budget import blocks_for_tokens
from tests.conftest import Note
from tests.engine.harness import ROOMY, Mode, Reference, answer, build, load_reference

FULL = os.environ.get("OCTAVO_FULL_MATRIX") == "1"
ENOUGH = 24
"""Prompts that do not fit a tight cache together."""
COUNT = int(os.environ.get("OCTAVO_DEMO_PROMPTS", "64" if FULL else str(ENOUGH)))
TOKENS = int(os.environ.get("OCTAVO_DEMO_TOKENS", "64" if FULL else "32"))
LONGEST = 900


def lengths() -> list[int]:
    """From 1 to 900 tokens, short prompts more often than long ones."""
    chance = random.Random(0)
    chosen = [LONGEST, 1, 256, 16, 17, 64]
    chosen += [round(LONGEST ** (chance.random() ** 1.8)) for _ in range(COUNT - len(chosen))]
    return [*chosen[: COUNT - 1], chosen[2]]


def room(block_size: int) -> int:
    """Tokens that a cache must hold to forget nothing: all answers, and those of the second time beside them."""
    again = [2 * blocks_for_tokens(length + TOKENS, block_size) - length // block_size for length in lengths()]
    return max(ROOMY, block_size * sum(again))


def roomy(block_size: int, **others: Any) -> Mode:
    """Everything is submitted at once, and cached."""
    plain = Mode(
        block_size=block_size,
        chunk=None,
        prefix_caching=True,
        arrival="at once",
        cache_tokens=room(block_size),
        compile=True,
    )
    return replace(plain, **others)


TIGHT = LONGEST + TOKENS + 316
WAYS: list[dict[str, Any]] = [
    {},
    {"arrival": "random"},
    {"chunk": 32},
    {"cache_tokens": TIGHT},
    {"prefix_caching": False},
    {"arrival": "random", "chunk": 32, "prefix_caching": False, "attention": "reference", "compile": False},
]
MODES = (
    [roomy(size, **way) for way in WAYS for size in (1, 16, 64, 256)]
    if FULL
    else [
        roomy(16),
        roomy(64, chunk=32, prefix_caching=False, arrival="random"),
        roomy(1, cache_tokens=TIGHT),
        roomy(256, attention="reference", compile=False),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def every_core() -> Iterator[None]:
    """This model is large enough for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


def demo_prompts(folder: Path) -> list[list[int]]:
    """Text and noise in turn; some texts begin alike, and the third comes twice."""
    chance = random.Random(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8"))["input_ids"]
    prompts = []
    for number, length in enumerate(lengths()):
        start = chance.choice([0, chance.randrange(len(text) - LONGEST)])
        noise = chance.choices(range(tokenizer.vocab_size), k=length)
        prompts.append(noise if number % 2 else text[start : start + length])
    return [*prompts[:-1], prompts[2]]


@pytest.fixture(scope="module")
def reference(demo_model_path: Path) -> Reference:
    """In padded batches of similar lengths, to save time: the place where an answer differs is computed again alone."""
    model = load_reference(demo_model_path, "sdpa")
    prompts = demo_prompts(demo_model_path)
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    while order:
        size = max(8, len(order) // 2)  # the short ones, of which there are many, in few batches
        batch, order = order[:size], order[size:]
        longest = max(len(prompts[number]) for number in batch)
        padding = [longest - len(prompts[number]) for number in batch]
        ids = torch.tensor([[0] * pad + prompts[number] for pad, number in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        for number, found in zip(batch, output[:, longest:].tolist(), strict=True):
            answers[number] = found
    return Reference(model, prompts, answers)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_demo_model(demo_model_path: Path, reference: Reference, mode: Mode, note: Note) -> None:
    numbers, prompts = range(len(reference.prompts)), reference.prompts
    engine = build(demo_model_path, mode).engine
    first = answer(engine, prompts, TOKENS, arrival=mode.arrival)
    close = reference.compare(numbers, first.tokens, mode.name)
    if mode.cache_tokens == TIGHT:
        assert engine.scheduler.preemptions > 0 or COUNT < ENOUGH
    elif mode.prefix_caching:
        again = answer(engine, prompts, TOKENS)
        close += reference.compare(numbers, again.tokens, f"{mode.name}, all cached")
        assert again.cached == [len(prompt) - 1 for prompt in prompts]
    else:
        assert not any(first.cached)
    note(f"{mode.name}: {close} close calls")
    for call in reference.close_calls[-close:] * bool(close):
        note(call)
    assert close <= (3 if FULL else 1)
