"""Greedy answers from an engine in many ways of running it, and transformers' own to compare them with."""

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.models.quiet import quiet

DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cpu")
"""On which engines run: on a GPU their tokens are to be the same."""
ROOMY = 8192
"""Tokens that a roomy cache holds."""
CLOSE = 1e-4
"""Logits that lie no further apart may change places: sums in another order differ by this much."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way of running the engine."""

    block_size: int
    chunk: int | None
    """max_batch_prefill_tokens."""
    prefix_caching: bool
    arrival: str
    """"at once", or "random": some come, some steps run, more come."""
    cache_tokens: int
    attention: str | None = None
    compile: bool = False

    @property
    def tight(self) -> bool:
        """Is the cache so small that requests are preempted?"""
        return self.cache_tokens < ROOMY

    @property
    def name(self) -> str:
        """For the test's name and its messages."""
        prefix = "prefix" if self.prefix_caching else "no-prefix"
        room = "tight" if self.tight else "roomy"
        chunk = "whole" if self.chunk is None else f"chunks-{self.chunk}"
        return "-".join(
            [f"bs{self.block_size}", chunk, prefix, self.arrival.replace(" ", "-"), room, str(self.attention)]
            + ["compiled"] * self.compile
        )


def pairs_left_out(modes: Sequence[Mode]) -> list[tuple[str, Any, str, Any]]:
    """Pairs of values, of those that some mode has, that no single mode has together."""
    names = ["block_size", "chunk", "prefix_caching", "arrival", "tight", "attention", "compile"]
    values = {name: list(dict.fromkeys(getattr(mode, name) for mode in modes)) for name in names}
    return [
        (a, left, b, right)
        for a, b in itertools.combinations(names, 2)
        for left, right in itertools.product(values[a], values[b])
        if not any(getattr(mode, a) == left and getattr(mode, b) == right for mode in modes)
    ]


@dataclass
class Reference:
    """transformers' own greedy continuations of prompts, and its logits where they are asked for."""

    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    close_calls: list[str] = field(default_factory=list)
    close_places: set[tuple[int, int]] = field(default_factory=set)
    """Prompt and new token of each close call."""

    @classmethod
    def load(cls, folder: Path, prompts: list[list[int]], tokens: int, attention: str = "eager") -> "Reference":
        """Answer each prompt alone, so that no padding is in it."""
        model = load_reference(folder, attention)
        return cls(model, prompts, [generate(model, prompt, tokens) for prompt in prompts])

    def compare(self, numbers: Sequence[int], answers: Sequence[Sequence[int]], what: str) -> int:
        """Raise AssertionError where answers to these prompts differ, close calls aside; returns how many those are."""
        close = 0
        for number, found in zip(numbers, answers, strict=True):
            expected = self.answers[number]
            if list(found) != expected:
                assert len(found) == len(expected), f"{what}: prompt {number} has {len(found)} tokens"
                self._judge(number, list(found), what)
                close += 1
        return close

    def _judge(self, number: int, found: list[int], what: str) -> None:
        """The first difference is a close call if transformers itself hardly prefers its own token."""
        expected = self.answers[number]
        place = next(index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        logits = last_logits(self.model, self.prompts[number] + expected[:place])
        gap = float(logits.max() - logits[found[place]])
        story = (
            f"{what}: prompt {number} of {len(self.prompts[number])} tokens, new token {place}: {found[place]} instead "
            f"of {expected[place]}, whose logit is {gap:.2e} higher"
        )
        assert gap <= CLOSE, story
        self.close_calls.append(story)
        self.close_places.add((number, place))


def load_reference(folder: Path, attention: str = "eager") -> Any:
    """transformers' model, float32."""
    with quiet(progress=False):
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)


def generate(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' greedy continuation, which no end token ends."""
    ids = torch.tensor([prompt])
    # Without a mask, prompt tokens that happen to be the padding token would be taken for padding.
    output: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(output[0, len(prompt) :].tolist())


@torch.inference_mode()
def last_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits [vocab] behind these tokens."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits


def build(folder: Path, mode: Mode) -> LLM:
    """An engine in this mode, on a cache full of NaN."""
    llm = LLM(
        folder,
        attention=mode.attention,
        compile=mode.compile,
        block_size=mode.block_size,
        prefix_caching=mode.prefix_caching,
        max_batch_total_tokens=mode.cache_tokens,
        max_batch_prefill_tokens=mode.chunk,
        dtype="float32",
        device=DEVICE,
        progress=False,
    )
    soil(llm.engine)
    return llm


def soil(engine: Engine) -> None:
    """Fill every slot of every layer with NaN, block 0's too: what is read without having been written shows."""
    kv = engine.scheduler.kv
    for group in engine.runner.groups:
        spec, where = group.backend.spec, group.backend.device.torch_device
        slots = torch.arange(kv.pool.num_blocks * kv.block_size, device=where)
        nan = torch.full((len(slots), spec.kv_heads, spec.head_size), torch.nan, dtype=spec.dtype, device=where)
        for layer in range(spec.layers):
            group.backend.layout.write(group.cache, layer, nan, nan, slots)


@dataclass
class Answered:
    """What one run brought, in the order of the prompts."""

    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens that were found in the cache."""


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int | Sequence[int],
    *,
    arrival: str = "at once",
    seed: int = 0,
) -> Answered:
    """Run the prompts to as many new tokens each; greedy, and no end token ends them."""
    chance = random.Random(seed)
    counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    order = list(range(len(prompts)))
    if arrival == "random":
        chance.shuffle(order)
    ids: dict[int, int] = {}
    result = Answered([[] for _ in prompts], [0] * len(prompts))
    while order or engine.busy:
        for _ in range(len(order) if arrival == "at once" else min(len(order), chance.choice([0, 0, 1, 1, 2, 5]))):
            number = order.pop(0)
            greedy = SamplingParams(max_tokens=counts[number], temperature=0, ignore_eos=True)
            ids[engine.submit(prompts[number], greedy, seed=0)] = number
        for output in engine.step():
            assert output.error is None, output.error
            number = ids[output.request_id]
            result.cached[number] = output.cached_tokens
            if output.token_id is not None:
                result.tokens[number].append(output.token_id)
    stats = engine.scheduler.kv.stats()
    engine.scheduler.kv.check()
    assert stats.free + stats.cached == stats.total, "a block is still held"
    return result
