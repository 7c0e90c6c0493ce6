"""What observers are told of steps and requests, as far as it can be counted by hand."""

from typing import Any

from octavo.engine.request import Label
from octavo.engine.sampling_params import SamplingParams
from octavo.hooks import RequestSummary, StepStats, hookimpl
from tests.distributions import plugins_of
from tests.engine.memory_runner import Answers
from tests.engine.test_engine import start


class Watcher:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.requests: list[RequestSummary] = []

    @hookimpl
    def octavo_step_finished(self, step: StepStats) -> None:
        self.steps.append(step)

    @hookimpl
    def octavo_request_finished(self, request: RequestSummary) -> None:
        self.requests.append(request)


def watched(blocks: int, **limits: Any) -> tuple[Answers, Watcher]:
    answers, watcher = start(block_size=4, blocks=blocks, **limits), Watcher()
    answers.engine.plugins = plugins_of(watcher)
    return answers, watcher


def test_evicted_blocks_are_those_of_their_step() -> None:
    """Ten blocks, and prompts of four: the third one needs two that the first left behind."""
    answers, watcher = watched(10)
    for first in range(3):
        answers.submit([first] * 16, max_tokens=1)
        answers.drain()
    assert [step.evicted_blocks for step in watcher.steps] == [0, 0, 2]
    assert [step.free_blocks for step in watcher.steps] == [6, 2, 0]


def test_each_sequence_of_a_prompt_is_told_with_its_label() -> None:
    answers, watcher = watched(20)
    label = Label("r-1", "00-trace")
    answers.engine.submit_all([1] * 9, SamplingParams(max_tokens=2, n=2), label=label)
    answers.drain()
    first, second = watcher.requests
    assert first.request_id != second.request_id
    for told in (first, second):
        assert (told.label, told.trace, told.sequences) == ("r-1", "00-trace", 2)
        assert (told.finish_reason, told.prompt_tokens, told.generated_tokens) == ("length", 9, 2)
        assert told.queue_seconds is not None
        assert told.first_token_seconds is not None
        assert 0 <= told.queue_seconds <= told.first_token_seconds <= told.seconds


def test_one_that_never_ran_has_no_times_but_its_own() -> None:
    answers, watcher = watched(20, max_batch_size=1)
    answers.submit([1] * 9)
    waiting = answers.submit([2] * 9)
    answers.step()
    answers.engine.cancel(waiting)
    (told,) = watcher.requests
    assert (told.finish_reason, told.queue_seconds, told.first_token_seconds) == ("cancelled", None, None)
    assert told.seconds > 0
    assert (told.label, told.trace, told.sequences) == ("", "", 1)
