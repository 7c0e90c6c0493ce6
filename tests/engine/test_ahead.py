"""Steps that are launched before the tokens of the one before have arrived: what may go wrong in between."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from octavo.engine.request import FinishReason
from octavo.engine.runner import Flight, OutOfMemory
from octavo.engine.step import Step
from octavo.engine.uninterrupted import uninterrupted
from tests.engine.memory_runner import VOCABULARY, Answers, prompt_of, start_engine
from tests.engine.slot_memory import continuation


def start(**limits: int) -> Answers:
    return start_engine(**({"ahead": True, "max_batch_prefill_tokens": 20} | limits))  # type: ignore[arg-type]


def expected(length: int, first: int, tokens: int) -> list[int]:
    return continuation(prompt_of(length, first), tokens, VOCABULARY)


def test_every_step_after_the_first_follows_one_whose_tokens_are_unknown() -> None:
    answers = start()
    asked = [answers.submit(prompt_of(8, first), 12) for first in range(2)]
    answers.drain()
    assert [answers.tokens[request] for request in asked] == [expected(8, first, 12) for first in range(2)]
    assert answers.engine.steps == 12
    assert answers.runner.followed == 11


def test_a_cache_that_is_nearly_full_is_no_reason_to_wait() -> None:
    """There is room for what these requests will have, and for little more."""
    answers = start(block_size=4, blocks=9, max_batch_prefill_tokens=400)
    asked = [answers.submit(prompt_of(8, first), 9) for first in range(2)]
    answers.drain()
    assert [answers.tokens[request] for request in asked] == [expected(8, first, 9) for first in range(2)]
    assert answers.runner.followed == answers.engine.steps - 1


def test_an_end_is_found_out_a_step_late_and_costs_nobody_anything() -> None:
    end = expected(8, 0, 5)[-1]
    answers = start_engine(ahead=True, end_ids=[end], max_batch_prefill_tokens=20)
    ended, other = answers.submit(prompt_of(8), 12), answers.submit(prompt_of(9, 3), 12, ignore_eos=True)
    answers.drain()
    assert answers.tokens[ended] == expected(8, 0, 5)[: answers.tokens[ended].index(end) + 1]
    assert answers.ended[ended] == FinishReason.EOS
    assert answers.tokens[other] == expected(9, 3, 12)
    assert answers.runner.followed > 8


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("place", ["failing", "failing_wait"])
@pytest.mark.parametrize("leaves", [True, False])
def test_an_interrupt_loses_no_token_of_those_that_stay(place: str, steps: int, leaves: bool) -> None:
    answers = start()
    gone, stays = answers.submit(prompt_of(10), 12), answers.submit(prompt_of(9, 3), 12)
    for _ in range(steps):
        answers.step()
    setattr(answers.runner, place, KeyboardInterrupt())
    answers.broke_off = True
    with pytest.raises(KeyboardInterrupt):
        answers.step()
    if leaves:
        answers.engine.cancel(gone)
    answers.drain()
    assert answers.tokens[stays] == expected(9, 3, 12)
    assert leaves or answers.tokens[gone] == expected(10, 0, 12)
    assert answers.runner.followed > 2


@pytest.mark.parametrize("ahead", [True, False])
def test_what_the_device_failed_at_is_not_taken_for_computed(ahead: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nor what was launched behind it. The requests end with the reason, and the same prompt is answered afresh."""
    answers = start_engine(ahead=ahead, max_batch_prefill_tokens=20)
    first = answers.submit(prompt_of(20), 5)
    answers.runner.failing_wait = RuntimeError("the device lost it")
    for _ in range(2 if ahead else 1):
        answers.step()
    assert answers.ended == {first: FinishReason.ERROR}
    assert answers.last[first].error == "RuntimeError: the device lost it"
    answers.runner.memory.blocks[:] = -1
    again = answers.submit(prompt_of(20), 5)
    answers.drain()
    assert answers.tokens[again] == expected(20, 0, 5)
    assert answers.last[again].cached_tokens == 0


def test_a_launch_that_fails_leaves_the_token_before_it(caplog: pytest.LogCaptureFixture) -> None:
    answers = start()
    request = answers.submit(prompt_of(10), 12)
    for _ in range(4):
        answers.step()
    answers.runner.failing = RuntimeError("once")
    answers.step()
    assert answers.tokens[request] == expected(10, 0, 4)
    assert answers.ended[request] == FinishReason.ERROR
    assert not answers.engine.busy


@pytest.mark.parametrize("ahead", [True, False])
def test_each_step_is_told_once_with_what_it_computed(ahead: bool) -> None:
    answers = start_engine(ahead=ahead, max_batch_prefill_tokens=8)
    for first in range(3):
        answers.submit(prompt_of(10 + first, first), 4 + first)
    told = []
    while answers.engine.busy:
        answers.step()
        told += answers.engine.take_stats()
    assert len(told) == answers.engine.steps
    assert sum(step.prefill_tokens for step in told) == 10 + 11 + 12
    assert sum(step.decode_tokens for step in told) == 3 + 4 + 5
    assert [step.prefill_tokens for step in told[:3]] == [8, 8, 8]
    assert answers.engine.last_step == told[-1]
    assert all(step.seconds > 0 for step in told)
    assert np.isfinite([step.seconds for step in told]).all()


@pytest.mark.parametrize("leaves", ["ends", "is cancelled"])
def test_nothing_is_left_to_whoever_comes_next(leaves: str, caplog: pytest.LogCaptureFixture) -> None:
    """A step that ran for nobody is waited for: neither its time nor its failure is the next request's."""
    end = expected(8, 0, 4)[-1]
    answers = start_engine(ahead=True, end_ids=[end] if leaves == "ends" else [], max_batch_prefill_tokens=20)
    request = answers.submit(prompt_of(8), 30)
    while answers.engine.busy and len(answers.tokens[request]) < 4:
        answers.step()
    if leaves == "is cancelled":
        answers.engine.cancel(request)
    answers.engine.settle()
    assert not answers.engine.busy
    assert len(answers.engine.take_stats()) == answers.engine.steps
    answers.runner.failing_wait = RuntimeError("nobody waits for this")
    answers.engine.settle()
    assert answers.runner.failing_wait is not None
    answers.runner.failing_wait = None
    again = answers.submit(prompt_of(9, 3), 3)
    answers.drain()
    assert len(answers.tokens[again]) <= 3
    assert answers.last[again].error is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OutOfMemory("the copy itself")])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_copy_that_was_not_made_is_made_by_the_next_launch(
    ahead: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = start_engine(ahead=ahead, block_size=16)
    answers.submit(prompt_of(20), 1)
    answers.drain()
    launch = answers.runner.launch

    def breaks(step: Step) -> Flight:
        assert step.copies.size
        monkeypatch.setattr(answers.runner, "launch", launch)
        raise error

    monkeypatch.setattr(answers.runner, "launch", breaks)
    prompt = [*prompt_of(20), 1, 2, 3]
    request = answers.submit(prompt, 4)
    answers.broke_off = True
    with contextlib.suppress(KeyboardInterrupt):
        answers.step()
    answers.drain()
    assert answers.tokens[request] == continuation(prompt, 4, VOCABULARY)
    assert answers.last[request].cached_tokens == 20


def test_keys_that_the_device_lost_are_not_kept_by_who_used_them(caplog: pytest.LogCaptureFixture) -> None:
    """The step that computed them fails when the one behind it, which reads them, is launched."""
    answers = start_engine(ahead=True, max_batch_prefill_tokens=20)
    answers.submit(prompt_of(20), 5)
    answers.step()
    answers.submit([*prompt_of(20), 5, 6], 5)
    answers.runner.failing, answers.runner.failing_wait = RuntimeError("launch"), RuntimeError("lost")
    answers.step()
    assert not answers.engine.busy
    answers.runner.memory.blocks[:] = -1
    again = answers.submit(prompt_of(20), 5)
    answers.drain()
    assert answers.tokens[again] == expected(20, 0, 5)
    assert answers.last[again].cached_tokens == 0


@pytest.fixture
def interrupted_as_usual() -> Iterator[None]:
    """Whoever runs the tests may have other plans for Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupted_as_usual")
def test_an_interrupt_waits_for_the_end_of_what_must_be_whole() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
        done.append("not this")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    elsewhere: list[bool] = []

    def work() -> None:
        with uninterrupted():
            elsewhere.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert elsewhere
