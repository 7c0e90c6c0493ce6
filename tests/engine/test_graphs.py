"""Captured decode steps give what steps that run as they are give: on a device that plays a capture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.attention.contract import AttentionBatch
from octavo.attention.device import CPU
from octavo.engine.build import build_engine
from octavo.engine.graphs import MOST_ROWS, DecodeGraphs, ladder
from octavo.engine.runner import Flight
from octavo.engine.step import Step
from octavo.models.load import load
from octavo.settings import Settings
from tests import checkpoints
from tests.conformance.vectorised import TokenPlan, Vectorised
from tests.distributions import Offers, plugins_of
from tests.engine.harness import generate, load_reference

PROMPTS = [[number, 7, *range(5 * number)] for number in range(1, 8)]
LENGTHS = [12, 3, 9, 1, 12, 5, 7]
"""Unequal, so that the batch shrinks through several sizes."""


class Replaying(CPU):
    """A replay runs the step anew, with the plan of the capture and whatever lies in the tensors by then."""

    name = "replaying"
    captures = True
    asynchronous = True

    def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
        return run


class Refreshing(Vectorised):
    """Of every step it is told on the host what the device's tensors hold."""

    name = "refreshing"
    platform = "replaying"
    capabilities = replace(Vectorised.capabilities, head_sizes=(...,))

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> TokenPlan:
        assert batch.host_lengths is not None
        for name, host in batch.host_lengths._asdict().items():
            assert host.dtype == np.int32
            assert host.tolist() == getattr(batch, name).tolist()
        return super().plan(batch, bucket)


class Fresh(Refreshing):
    """Never gives the captured object: every step is to be run as it is."""

    name = "fresh"

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> TokenPlan:
        return super().plan(batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = load_reference(folder)
    return [generate(model, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]


def engine(folder: Path, device: type[CPU] = Replaying, attention: str = "refreshing", **settings: Any) -> LLM:
    chosen: dict[str, Any] = {"block_size": 16, "max_batch_total_tokens": 2048, "max_total_tokens": 128}
    chosen |= {"max_batch_size": 8, "cuda_graphs": "auto", "compile": False}
    plugins = plugins_of(Offers([Refreshing, Fresh], [device]))
    return LLM(str(folder), device=device.name, attention=attention, plugins=plugins, **chosen | settings)


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    return graphs


def answers(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length, ignore_eos=True, temperature=0) for length in LENGTHS]
    return [list(output.completions[0].token_ids) for output in llm.generate(PROMPTS, params)]


def test_replayed_steps_give_the_same_tokens(folder: Path, expected: list[list[int]]) -> None:
    llm = engine(folder)
    assert answers(llm) == expected
    assert graphs_of(llm).sizes == [1, 2, 4, 8]
    assert graphs_of(llm).replays >= max(LENGTHS) - 2


def test_preempted_requests_cached_prompts_and_their_probabilities(folder: Path) -> None:
    """A cache for few of them; then prompts of which one token is left to compute, whose logits are all wanted."""
    llm = engine(folder, max_batch_total_tokens=64, max_total_tokens=64)
    long = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0) for _ in range(4)]
    alone = [list(one.completions[0].token_ids) for one in engine(folder, cuda_graphs="0").generate(PROMPTS[:4], long)]
    for _ in range(2):
        assert [list(one.completions[0].token_ids) for one in llm.generate(PROMPTS[:4], long)] == alone
    assert llm.engine.scheduler.preemptions
    wanted = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0, logprobs=2)
    replayed, plain = (
        engine(folder, cuda_graphs=sizes).generate([[9], [8], *PROMPTS[:3]], wanted) for sizes in ("auto", "0")
    )
    for one, other in zip(replayed, plain, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        for mine, theirs in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


DRAWN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"top_p": 0.8, "seed": 1}]
HELD_BACK: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 4, "seed": 3}
"""What the host must know the last token for, and an end that may not come at once."""


@pytest.mark.parametrize(("kinds", "ahead"), [(DRAWN, True), ([*DRAWN, HELD_BACK], False)], ids=["drawn", "held back"])
def test_running_ahead_changes_no_token(
    folder: Path, kinds: list[dict[str, Any]], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are drawn, held back and ended by one of their tokens, with room for all and for few."""
    plain = engine(folder, cuda_graphs="0")
    plain.engine.ahead = False
    (free,) = plain.generate([PROMPTS[6]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    ends = free.completions[0].token_ids[5]
    params = [
        SamplingParams(max_tokens=length + 6, ignore_eos=True, stop_token_ids=[ends], **kinds[at % len(kinds)])
        for at, length in enumerate(LENGTHS)
    ]
    params[6] = SamplingParams(max_tokens=18, ignore_eos=True, stop_token_ids=[ends], temperature=0)
    expected = [list(one.completions[0].token_ids) for one in plain.generate(PROMPTS, params)]
    assert len(expected[6]) < 18
    rooms: list[dict[str, Any]] = [{}, {"max_batch_total_tokens": 96, "max_total_tokens": 64}]
    for room in rooms:
        llm = engine(folder, **room)
        follows = watched(llm, monkeypatch)
        assert [list(one.completions[0].token_ids) for one in llm.generate(PROMPTS, params)] == expected
        assert llm.engine.scheduler.kv.stats().held == 0
        assert sum(follows) > (len(follows) // 2 if ahead and not room else 0)


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that is launched from now on: did it begin with tokens that the host did not know?"""
    follows: list[bool] = []
    launch = llm.engine.runner.launch

    def watching(step: Step) -> Flight:
        follows.append(step.follows)
        return launch(step)

    monkeypatch.setattr(llm.engine.runner, "launch", watching)
    return follows


def test_sizes_that_the_user_names(folder: Path, expected: list[list[int]]) -> None:
    """More rows than the largest size run as they are."""
    llm = engine(folder, cuda_graphs="3, 5,3")
    assert answers(llm) == expected
    assert graphs_of(llm).sizes == [3, 5]
    assert graphs_of(llm).replays


def test_none_are_captured_where_none_are_wanted(folder: Path, expected: list[list[int]]) -> None:
    llm = engine(folder, cuda_graphs="0")
    assert llm.engine.runner.graphs is None
    assert answers(llm) == expected


def test_a_backend_that_asks_for_it_runs_as_it_is(folder: Path, expected: list[list[int]]) -> None:
    llm = engine(folder, attention="fresh")
    assert answers(llm) == expected
    assert graphs_of(llm).replays == 0


def test_a_step_that_cannot_be_captured_is_a_warning(
    folder: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Replaying):
        name = "refusing"

        def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING, logger="octavo"):
        llm = engine(folder, Refusing)
    assert "without graphs: a step of 8 rows: operation not permitted" in caplog.text
    assert answers(llm) == expected


def test_what_graphs_keep_is_no_room_for_the_cache(folder: Path) -> None:
    class Counting(Replaying):
        name = "counting"

        captured = 0

        def capture(self, run: Callable[[], None], pool: object = None) -> Callable[[], None] | None:
            self.captured += 1
            return run

        def peak(self, run: Callable[[], None]) -> int:
            """Of a measured step nothing; of graphs so much in all, and so much for each."""
            before = self.captured
            run()
            return 9000 + 100 * (self.captured - before) if self.captured > before else 0

    plugins = plugins_of(Offers([Refreshing], [Counting]))
    chosen: dict[str, Any] = {"attention": "refreshing", "block_size": 16, "max_batch_size": 8, "max_total_tokens": 128}
    chosen["compile"] = False
    for sizes, kept in ((None, 9400), ("7", 9100), ("0", 0)):
        built = build_engine(load(folder, progress=False), Counting(), Settings(cuda_graphs=sizes, **chosen), plugins)
        assert built.memory.graphs == kept


@given(most=st.integers(1, 2000))
def test_every_number_of_rows_has_a_size(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, MOST_ROWS)
    for rows in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(7, rows / 4)
