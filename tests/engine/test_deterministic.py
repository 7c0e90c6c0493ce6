"""Deterministic: what a request gets is the same to the bit alone and among others, however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.device import CPU
from octavo.attention.wish import BackendUnavailable
from octavo.engine import build
from octavo.engine.fixed import FixedSteps
from octavo.engine.graphs import NotCaptured
from octavo.engine.step import Step
from octavo.models.capture import Forward, eager
from octavo.outputs import RequestOutput
from octavo.settings import SettingsError
from octavo_reference.backend import ReferenceBackend
from tests import checkpoints
from tests.conformance.vectorised import Vectorised
from tests.distributions import Offers, plugins_of
from tests.engine.harness import DEVICE, generate, load_reference, soil
from tests.engine.sampling import FILTERS
from tests.engine.test_graphs import Replaying

TOKENS = 32
"""Of every step."""
LENGTHS = (5, 40, 1, 70, 33, 9)
PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6][: number % 9] + [(7 * number + 11 * at) % 250 for at in range(length)]
    for number, length in enumerate(LENGTHS)
]
"""Some begin alike."""
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"prompt_logprobs": 2}, {"top_p": 0.8}, {"temperature": 0.7}, *FILTERS[-3:-1],
]  # fmt: skip
WANTED = [
    SamplingParams(max_tokens=16 + number % 5, logprobs=number % 4, ignore_eos=True, seed=number, **fields)
    for number, fields in enumerate(FIELDS)
]


def engine(folder: Path, tokens: int = 4096, **settings: Any) -> LLM:
    chosen: dict[str, Any] = {"block_size": 8, "max_batch_prefill_tokens": TOKENS, "compile": False, "device": DEVICE}
    chosen |= {"deterministic": True, "max_total_tokens": 128}
    llm = LLM(folder, max_batch_total_tokens=tokens, progress=False, **chosen | settings)
    soil(llm.engine)
    return llm


def bits(output: RequestOutput) -> list[Any]:
    """Tokens and all log-probabilities, which are float32 numbers and as exact as Python's."""
    (completion,) = output.completions
    assert completion.error is None, completion.error
    return [completion.token_ids, completion.logprobs, output.prompt_logprobs]


def answers(llm: LLM, numbers: Sequence[int] = range(len(PROMPTS))) -> list[list[Any]]:
    outputs = llm.generate([PROMPTS[at] for at in numbers], [WANTED[at] for at in numbers], progress=False)
    return [bits(output) for output in outputs]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"compile": True}),
        ("gemma3_text", {}),
        ("gpt2", {"attention": "reference", "dtype": "bfloat16"}),
    ],
    ids=["compiled", "windows", "bfloat16"],
)
def test_alone_together_preempted_and_from_the_cache(
    architecture: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among others prompts are computed in other chunks too, of what those that decode leave of a step.

    Every step is of one shape, or is the one that was captured.
    """
    folder = checkpoints.make(architecture, tmp_path)
    llm = engine(folder, **settings)
    shapes = watched(llm, monkeypatch)
    alone = []
    for number in range(len(PROMPTS)):
        llm.engine.scheduler.kv.reset()
        alone += answers(llm, [number])
    llm.engine.scheduler.kv.reset()
    assert answers(llm) == alone
    assert answers(llm) == alone
    assert llm.engine.scheduler.kv.stats().hit_tokens > 100
    assert answers(llm, range(len(PROMPTS))[::-1]) == alone[::-1]
    fixed = llm.engine.runner.fixed
    assert fixed is not None
    assert fixed.replays if fixed.captured else set(shapes) == {(TOKENS, TOKENS)}
    tight = engine(folder, tokens=144, **settings)
    assert answers(tight) == alone
    assert tight.engine.scheduler.preemptions


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and rows of logits of each forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    fixed = llm.engine.runner.fixed
    assert fixed is not None
    forward = fixed.forward

    def watching(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        shapes.append((ids.shape[1], len(rows)))
        return forward(ids, positions, rows)

    monkeypatch.setattr(fixed, "forward", watching)
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


def test_tokens_are_transformers(folder: Path) -> None:
    model, greedy = load_reference(folder), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    outputs = engine(folder).generate(PROMPTS, greedy, progress=False)
    assert [output.completions[0].token_ids for output in outputs] == [generate(model, one, 10) for one in PROMPTS]


@pytest.mark.parametrize(
    ("settings", "tokens", "rows"),
    [
        ({"max_batch_prefill_tokens": 17}, 32, 32),
        ({"max_batch_prefill_tokens": None}, 256, 256),
        ({"max_batch_prefill_tokens": None, "max_batch_size": 300}, 304, 300),
        ({"max_batch_size": 5}, 32, 5),
    ],
)
def test_how_many_tokens_a_step_has(folder: Path, settings: dict[str, Any], tokens: int, rows: int) -> None:
    llm = engine(folder, **settings)
    limits, fixed = llm.engine.scheduler.limits, llm.engine.runner.fixed
    assert fixed is not None
    assert (limits.max_batch_prefill_tokens, fixed.tokens, limits.max_batch_size) == (tokens, tokens, rows)
    assert limits.counts_decodes


def test_a_step_of_too_many_tokens_is_refused(folder: Path) -> None:
    llm = engine(folder)
    llm.engine.scheduler.limits = replace(llm.engine.scheduler.limits, counts_decodes=False)
    first = llm.engine.submit([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), seed=0)
    llm.engine.step()
    llm.engine.submit(PROMPTS[1], SamplingParams(max_tokens=3), seed=0)
    errors = {output.request_id: output.error for output in llm.engine.step()}
    assert errors[first] == f"ValueError: a step of {TOKENS + 1} tokens, each has {TOKENS}: schedule no more"


def test_without_it_nothing_changes(folder: Path) -> None:
    runner = engine(folder, deterministic=False).engine.runner
    assert (runner.fixed, runner.sampler.invariant) == (None, False)
    assert not any(group.backend.spec.batch_invariant for group in runner.groups)


# What cannot promise it is refused


@pytest.mark.parametrize("compile", [True, False])
def test_experts_share_out_what_is_in_a_step(compile: bool, tmp_path: Path) -> None:
    folder = checkpoints.make("qwen3_moe", tmp_path)
    with pytest.raises(SettingsError, match="what this model computes for a token depends on the others of its step"):
        engine(folder, compile=compile)


class Indifferent(Vectorised):
    """Promises nothing."""

    priority = 5
    capabilities = replace(Vectorised.capabilities, head_sizes=(...,))


def test_backends_that_cannot(folder: Path) -> None:
    """Another one is taken, or their reason is told."""
    plugins = plugins_of(Offers([Indifferent, ReferenceBackend], []))
    for deterministic, chosen in ((False, "test/vectorised"), (True, "any/reference")):
        llm = engine(folder, plugins=plugins, block_size=16, deterministic=deterministic)
        assert llm.selection.name == chosen
    with pytest.raises(BackendUnavailable, match="test/vectorised: deterministic is asked for: with it a token's bits"):
        engine(folder, plugins=plugins, block_size=16, attention="vectorised")


def test_kernels_that_do_not_keep_rows_apart_are_found_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a product whose last rows are computed by another kernel than the others."""

    def leaky(model: Any) -> Forward:
        forward = eager(model)

        def run(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
            logits = forward(ids, positions, rows).clone()
            logits[:, -1] *= 1 + 2e-7
            return logits

        return run

    monkeypatch.setattr(build, "eager", leaky)
    with pytest.raises(SettingsError, match=f"on {DEVICE} this model gives a token other bits at another place"):
        engine(folder)


# Captured


class Invariant(Vectorised):
    """All shapes are those of the bucket."""

    name = "invariant"
    platform = "replaying"
    capabilities = replace(Vectorised.capabilities, head_sizes=(...,), batch_invariant=True)


class Unwilling(Replaying):
    name = "unwilling"

    def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
        raise RuntimeError("operation not permitted when stream is capturing")


def on(device: type[CPU], folder: Path, **settings: Any) -> tuple[LLM, FixedSteps]:
    plugins = plugins_of(Offers([Invariant], [device]))
    llm = engine(folder, device=device.name, attention="invariant", block_size=16, plugins=plugins, **settings)
    fixed = llm.engine.runner.fixed
    assert fixed is not None
    return llm, fixed


def test_a_captured_step_is_replayed_for_whatever_a_step_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One step ahead of the host, too."""
    follows: list[bool] = []
    llm, fixed = on(Replaying, folder)
    assert fixed.captured
    run, replays = FixedSteps.run, fixed.replays

    def watching(self: FixedSteps, step: Step, last: Tensor) -> tuple[Tensor, Tensor]:
        follows.append(step.follows)
        return run(self, step, last)

    monkeypatch.setattr(FixedSteps, "run", watching)
    found = answers(llm, range(4))
    assert fixed.replays - replays == len(follows) > sum(follows) > 0
    for device, settings in ((Replaying, {"cuda_graphs": "0"}), (Unwilling, {})):
        plain, uncaptured = on(device, folder, **settings)
        assert not uncaptured.captured
        assert answers(plain, range(4)) == found
        assert uncaptured.replays == 0
    assert "without graphs: a step of 32 tokens: operation not permitted" in caplog.text


def test_a_device_that_gives_no_graph_is_told(folder: Path) -> None:
    class Forgetful(Replaying):
        name = "forgetful"

        def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
            return None

    _, fixed = on(Forgetful, folder)
    with pytest.raises(NotCaptured, match="forgetful captures nothing"):
        fixed.capture()
