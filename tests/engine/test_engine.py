"""The engine over real scheduling and step arrays, with a runner that needs no model."""

import random
import sys
from typing import Any

import numpy as np
import pytest

from octavo.engine.request import FinishReason
from octavo.engine.scheduler import RequestRefused
from octavo.kv.node import Namespace
from tests.engine.memory_runner import VOCABULARY, Answers, prompt_of, start_engine
from tests.engine.slot_memory import continuation


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test, with steps that are launched before the tokens of the one before are known too."""
    monkeypatch.setattr(sys.modules[__name__], "AHEAD", request.param)


AHEAD = False


def start(**limits: Any) -> Answers:
    return start_engine(ahead=AHEAD, **limits)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("block_size", "blocks"), [(1, 80), (4, 20), (16, 6)])
def test_every_request_gets_the_tokens_that_follow_its_prompt(block_size: int, blocks: int, seed: int) -> None:
    """Whatever comes when, in chunks, through a cache too small for all."""
    chance = random.Random(seed)
    answers = start(block_size=block_size, blocks=blocks, max_batch_prefill_tokens=13)
    asked = {}
    for _ in range(30):
        prompt = prompt_of(chance.choice([4, 16, 20])) + chance.choices(range(VOCABULARY), k=chance.randint(1, 15))
        count = chance.randint(8, 30)
        asked[answers.submit(prompt, count)] = continuation(prompt, count, VOCABULARY)
        for _ in range(chance.choice([0, 0, 3, 6])):
            answers.step()
    answers.drain()
    assert answers.tokens == asked
    assert set(answers.ended.values()) == {FinishReason.LENGTH}
    assert answers.engine.scheduler.preemptions > 0
    assert answers.engine.scheduler.kv.stats().evictions > 0


def test_a_request_begins_once_whatever_happens_to_it_later() -> None:
    """In chunks, and with its blocks taken away in between."""
    answers = start(block_size=4, blocks=20, max_batch_prefill_tokens=7)
    told: list[tuple[int, list[int]]] = []
    answers.engine.on_begin = lambda ids: told.append((answers.engine.scheduler.preemptions, ids))
    requests = [answers.submit(prompt_of(12, 5 * index), 30) for index in range(5)]
    answers.drain()
    assert answers.engine.scheduler.preemptions > 0
    assert [request for _, ids in told for request in ids] == requests
    assert all(ids for _, ids in told)


def test_a_step_that_fails_costs_its_own_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
    answers = start(max_batch_size=3)
    requests = [answers.submit(prompt_of(20 + index, index), 6) for index in range(5)]
    answers.step()
    answers.step()
    answers.runner.failing = MemoryError("the device is out of memory")
    answers.step()
    assert answers.ended == dict.fromkeys(requests[:3], FinishReason.ERROR)
    for request in requests[:3]:
        assert answers.last[request].error == "MemoryError: the device is out of memory"
        assert answers.last[request].token_id is None
    assert "a step of 3 requests failed" in caplog.text
    stats = answers.engine.scheduler.kv.stats()
    assert stats.held == 0
    answers.engine.scheduler.kv.check()
    assert answers.engine.busy
    answers.drain()
    for index in (3, 4):
        assert answers.tokens[requests[index]] == continuation(prompt_of(20 + index, index), 6, VOCABULARY)


def test_what_a_failed_step_wrote_is_not_taken_for_computed(caplog: pytest.LogCaptureFixture) -> None:
    """What steps before it committed may be reused."""
    answers = start(max_batch_prefill_tokens=10)
    answers.submit(prompt_of(30))
    answers.step()
    answers.runner.failing = RuntimeError("once")
    answers.step()
    again = answers.submit(prompt_of(30))
    answers.drain()
    assert answers.tokens[again] == continuation(prompt_of(30), 5, VOCABULARY)
    assert answers.last[again].cached_tokens == 8


def test_a_copy_that_a_failed_step_was_to_make_is_not_taken_for_made(caplog: pytest.LogCaptureFixture) -> None:
    answers = start(block_size=16)
    answers.submit(prompt_of(20), 1)
    answers.drain()
    prompt = [*prompt_of(20), 1, 2, 3]
    answers.submit(prompt)
    answers.runner.failing = RuntimeError("once")
    answers.step()
    answers.runner.memory.blocks[2:] = -1  # nothing behind the first block survived, the original of the copy did
    answers.runner.memory.write(np.arange(32, 36), prompt[16:20], np.arange(31, 32))
    again = answers.submit(prompt)
    answers.drain()
    assert answers.tokens[again] == continuation(prompt, 5, VOCABULARY)
    assert answers.last[again].cached_tokens == 20


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_frees_everything_at_any_point(steps: int) -> None:
    answers = start(max_batch_prefill_tokens=10, blocks=20)
    requests = [answers.submit(prompt_of(25, index)) for index in range(3)]
    for _ in range(steps):
        answers.step()
    for request in requests:
        answers.engine.cancel(request)
        answers.engine.cancel(request)
    answers.engine.cancel(1000)
    assert not answers.engine.busy
    assert answers.engine.step() == []
    answers.drain()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ([5, 97], "token id 97 of the prompt is not in the vocabulary: 0 to 96"),
        ([-1], "token id -1"),
        (prompt_of(41), r"41 tokens, the limit is 40 \(max_input_tokens\)"),
        (prompt_of(38), r"38 prompt tokens and 5 new ones .* 43, the limit is 42"),
    ],
)
def test_what_can_never_be_served_is_refused_and_not_queued(prompt: list[int], message: str) -> None:
    answers = start(max_input_tokens=40, max_total_tokens=42)
    with pytest.raises(RequestRefused, match=message):
        answers.submit(prompt)
    assert not answers.engine.busy


@pytest.mark.parametrize(("total", "blocks", "spare", "length"), [(60, 100, 0, 60), (500, 10, 0, 40), (500, 10, 3, 37)])
def test_without_max_tokens_a_request_ends_at_the_limit(total: int, blocks: int, spare: int, length: int) -> None:
    answers = start(blocks=blocks, max_total_tokens=total, spare_slots=spare)
    request = answers.submit(prompt_of(10), None)
    answers.drain()
    assert len(answers.tokens[request]) == length - 10
    assert answers.ended == {request: FinishReason.LENGTH}


def test_end_tokens_end_a_sequence_unless_it_ignores_them() -> None:
    prompt = prompt_of(10, 4)
    following = continuation(prompt, 12, VOCABULARY)
    assert len(set(following)) == 12
    answers = start(end_ids=[following[4]])
    plain = answers.submit(prompt, 12)
    longer = answers.submit(prompt, 12, ignore_eos=True)
    stopped = answers.submit(prompt, 12, stop_token_ids=[following[2]])
    both = answers.submit(prompt, 12, stop_token_ids=[following[7]], ignore_eos=True)
    answers.drain()
    lengths = {request: len(tokens) for request, tokens in answers.tokens.items()}
    assert lengths == {plain: 5, longer: 12, stopped: 3, both: 8}
    reasons = answers.ended
    assert reasons.pop(longer) is FinishReason.LENGTH
    assert set(reasons.values()) == {FinishReason.EOS}


def test_each_output_says_how_much_of_the_prompt_was_cached() -> None:
    answers = start(block_size=4)
    prompts = [prompt_of(21), prompt_of(21), [*prompt_of(10), 1], prompt_of(21)]
    namespaces = [None, None, None, Namespace(tenant="other")]
    cached = []
    for prompt, namespace in zip(prompts, namespaces, strict=True):
        request = answers.submit(prompt, namespace=namespace)
        answers.drain()
        cached.append(answers.last[request].cached_tokens)
    assert cached == [0, 20, 10, 0]


@pytest.mark.parametrize("chunk", [3, 7, 500])
def test_each_prompt_position_is_reported_once_in_order(chunk: int) -> None:
    """In chunks, and by requests that were preempted and compute their prompt again."""
    answers = start(blocks=14, max_batch_prefill_tokens=chunk)
    prompts = {
        answers.submit(prompt_of(17, index), 25, prompt_logprobs=0 if index % 2 else None): prompt_of(17, index)
        for index in range(4)
    }
    single = answers.submit([5], prompt_logprobs=0)
    answers.drain()
    assert answers.engine.scheduler.preemptions > 0
    assert answers.prompts == {request: prompt[1:] for request, prompt in prompts.items() if prompt[0] % 2}
    assert single not in answers.prompts
    for request, prompt in prompts.items():
        assert answers.tokens[request] == continuation(prompt, 25, VOCABULARY)
