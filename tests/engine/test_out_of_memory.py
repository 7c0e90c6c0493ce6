"""Steps that do not fit into the device's memory are tried in parts, and nobody's answer changes."""

from __future__ import annotations

import logging

import pytest
import torch

from octavo.engine.relief import Relief
from octavo.engine.request import FinishReason
from octavo.engine.runner import OutOfMemory, Runner
from octavo.engine.warm_up import Worst, step
from tests.engine.memory_runner import VOCABULARY, prompt_of, start_engine
from tests.engine.slot_memory import continuation


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("most", [1, 2, 7, 30])
def test_every_request_is_answered_rightly(ahead: bool, most: int, caplog: pytest.LogCaptureFixture) -> None:
    answers = start_engine(ahead=ahead, blocks=300)
    answers.runner.most_tokens = most
    asked = {answers.submit(prompt_of(20 + first, first), 9): first for first in range(8)}
    with caplog.at_level(logging.WARNING):
        answers.drain()
    for request, first in asked.items():
        assert answers.tokens[request] == continuation(prompt_of(20 + first, first), 9, VOCABULARY)
    assert set(answers.ended.values()) == {FinishReason.LENGTH}
    assert "did not fit and is tried in parts" in caplog.text
    told = answers.engine.take_stats()
    assert sum(step.prefill_tokens for step in told) >= sum(20 + first for first in range(8))


def test_one_request_that_cannot_fit_ends_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    answers = start_engine(ahead=True)
    answers.runner.most_tokens = 0
    request = answers.submit(prompt_of(20), 9)
    answers.drain()
    assert answers.last[request].error == "OutOfMemory: 1 tokens do not fit"
    answers.runner.most_tokens = None
    again = answers.submit(prompt_of(20), 9)
    answers.drain()
    assert answers.tokens[again] == continuation(prompt_of(20), 9, VOCABULARY)


def test_whole_prompts_cannot_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    answers = start_engine(ahead=False, whole_prompts=True)
    answers.runner.most_tokens = 10
    fits, not_fits = answers.submit(prompt_of(9), 4), answers.submit(prompt_of(20), 4)
    answers.drain()
    assert {answers.ended[request] for request in (fits, not_fits)} == {FinishReason.ERROR}


def test_limits_are_raised_again_and_forgotten() -> None:
    relief = Relief(chunk=100, rows=3)
    assert (relief.tokens(4096), relief.tokens(50), relief.is_full(3), relief.is_full(2)) == (100, 50, True, False)
    for _ in range(64):
        relief.calm()
    assert (relief.chunk, relief.rows) == (200, 6)
    for _ in range(64 * 20):
        relief.calm()
    assert (relief.tokens(4096), relief.is_full(10**6)) == (4096, False)


def test_the_runner_says_what_it_was() -> None:
    def forward(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    runner = Runner(forward, [], torch.device("cpu"))
    with pytest.raises(OutOfMemory, match="Tried to allocate 2 GiB"):
        runner.launch(step(Worst(4, 4, 0, True), 16))
