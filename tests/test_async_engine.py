"""`octavo.AsyncEngine` on a tiny Llama in a process of its own: what it answers, and what it leaves behind."""

import asyncio
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncEngine, SamplingParams
from octavo.async_engine import RequestRefused
from octavo.hooks import StepStats
from octavo.outputs import RequestOutput
from tests import checkpoints
from tests.async_engines import assert_clean, has_ended, long_request, start, stats
from tests.test_llm import drawn, greedy, load, prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(loop: asyncio.Runner, folder: Path) -> Iterator[AsyncEngine]:
    """Its prompts are computed 32 tokens a step, so that there is time to cancel one."""
    engine = loop.run(start(folder, max_batch_prefill_tokens=32, max_batch_size=4))
    yield engine
    loop.run(engine.close())
    assert has_ended(engine.info.process_id)


@pytest.fixture
def engine(loop: asyncio.Runner, shared: AsyncEngine) -> Iterator[AsyncEngine]:
    """Afterwards no request and no block may be left in use."""
    yield shared
    loop.run(assert_clean(shared))
    assert shared.healthy


# What it answers


async def answers(
    engine: AsyncEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    async def answer(prompt: list[int], wanted: SamplingParams) -> RequestOutput:
        return await (await engine.submit(prompt, wanted)).result()

    return await asyncio.gather(*map(answer, prompts, params))


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    """But for the last digits of log-probabilities, and for what was cached."""
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert (one.index, one.text, one.token_ids) == (other.index, other.text, other.token_ids)
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
        assert_close(one.logprobs, other.logprobs)
    assert_close(found.prompt_logprobs, expected.prompt_logprobs)


def assert_close(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_answers_are_those_of_llm(loop: asyncio.Runner, engine: AsyncEngine, llm: LLM) -> None:
    """Whatever is asked for: texts, several answers, the best of several, stop texts, log-probabilities, seeds."""
    params = [
        greedy(30), drawn(20, seed=1, n=3), drawn(20, seed=2, n=2, best_of=4), greedy(40, logprobs=3),
        greedy(10, prompt_logprobs=2), greedy(60, stop=["q", "~"], include_stop_text=True), greedy(60, stop="#"),
        drawn(30, seed=2**64 - 1, top_p=0.9, logit_bias={5: 3.0}, repetition_penalty=1.2), greedy(ignore_eos=False),
        greedy(20, stop_token_ids=list(range(60)), prompt_logprobs=0, logprobs=0, n=2),
    ]  # fmt: skip
    prompts = [prompt_of(length, length) for length in (200, 3, 40, 50, 100, 17, 20, 1, 33, 64)]
    expected = llm.generate(prompts, params, progress=False)
    found = loop.run(answers(engine, prompts, params))
    assert {one.finish_reason for output in expected for one in output.completions} >= {"length", "stop", "eos"}
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert_same(one, other)


def test_a_stream_brings_what_it_collects(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = await engine.submit(prompt_of(40, 9), drawn(20, seed=5, n=3, logprobs=1), request_id="one")
        tokens = [token async for token in stream]
        for completion in stream.output.completions:
            mine = [token for token in tokens if token.index == completion.index]
            assert [token.token_id for token in mine] == completion.token_ids
            assert "".join(token.text for token in mine) == completion.text
            assert [token.logprob for token in mine] == completion.logprobs
            assert [token.finish_reason for token in mine] == [None] * 19 + ["length"]
        assert stream.queue_seconds is not None
        assert stream.queue_seconds >= 0
        assert [token async for token in stream] == []

    loop.run(run())


def test_tokens_come_while_the_request_runs_and_steps_are_told(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> list[StepStats]:
        steps: list[StepStats] = []
        engine.on_step = steps.append
        async with await long_request(engine) as stream:
            assert (await anext(stream)).token_id is not None
            assert (await stats(engine)).running == 1
        engine.on_step = None
        return steps

    steps = loop.run(run())
    assert steps[0].prefill_tokens == 20
    assert all(step.decode_tokens == 1 for step in steps[1:])


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        slow = await engine.submit(prompt_of(30), greedy(200))
        quick = await engine.submit(prompt_of(30), greedy(300))
        other = (await quick.result()).completions[0].token_ids
        await assert_clean(engine)
        assert [token.token_id async for token in slow] == other[:200]

    loop.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "no tokens"),
        ([1, 260], greedy(), "token id 260 .* not in the vocabulary: 0 to 259"),
        ([2**70], greedy(), "no list of token ids"),
        (["one"], greedy(), "no list of token ids"),
        (prompt_of(1000), greedy(25), "1000 .* 25 .*1025.* 1024 .*ask for at most 24"),
        ([1], greedy(stop_token_ids=[300]), "stop_token_ids has token id 300"),
    ],
)
def test_what_can_never_be_served_is_refused(
    loop: asyncio.Runner, engine: AsyncEngine, prompt: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        loop.run(engine.submit(prompt, params))


def test_prefixes_are_a_tenants_own(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def cached(**whose: str) -> int:
        return (await (await engine.submit(prompt_of(101, 77), greedy(2), **whose)).result()).cached_tokens

    async def run() -> list[int]:
        whom = [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {"tenant": "", "cache_salt": "a"}]
        return [await cached(**whose) for whose in whom * 2]

    assert loop.run(run()) == [0] * 4 + [100] * 4


def test_bytes_that_are_no_message_do_it_no_harm(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    child: Any = engine._supervisor._child

    async def run() -> None:
        stream = await long_request(engine, tokens=50)
        for data in (b"", b"\xc1", b"\x00" * 10_000):
            child._socket.send(data)
        assert len((await stream.result()).completions[0].token_ids) == 50

    loop.run(run())


def test_signals_for_the_whole_group_are_the_parents_affair(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = await long_request(engine, tokens=50)
        os.kill(engine.info.process_id, signal.SIGINT)
        os.kill(engine.info.process_id, signal.SIGTERM)
        assert len((await stream.result()).completions[0].token_ids) == 50

    loop.run(run())


# Cancelling. The engine takes a cancellation before the question that follows it, and before its next step.


def test_cancelled_while_it_waits(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        first = await long_request(engine, n=4)
        running = set[int]()
        while len(running) < 4:  # accepted is not begun: all four may still wait for the step
            running.add((await anext(first)).index)
        waiting = await long_request(engine, 1)
        assert (await stats(engine)).waiting == 1
        waiting.cancel()
        assert (await stats(engine)).waiting == 0
        assert [token async for token in waiting] == []
        assert waiting.output.completions[0].finish_reason == "cancelled"
        first.cancel()
        await assert_clean(engine)

    loop.run(run())


@pytest.mark.parametrize("n", [1, 3])
def test_cancelled_while_its_prompt_is_computed(loop: asyncio.Runner, engine: AsyncEngine, n: int) -> None:
    """1000 tokens take 32 steps."""

    async def run() -> None:
        stream = await engine.submit(prompt_of(1000, 50 + n), drawn(20, n=n))
        stream.cancel()
        await assert_clean(engine)

    loop.run(run())


@pytest.mark.parametrize("n", [1, 4])
def test_cancelled_while_it_streams(loop: asyncio.Runner, engine: AsyncEngine, n: int) -> None:
    async def run() -> None:
        stream = await long_request(engine, n=n)
        for _ in range(3 * n):
            await anext(stream)
        stream.cancel()
        await assert_clean(engine)

    loop.run(run())


def test_one_of_several_is_cancelled(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = await engine.submit(prompt_of(20), drawn(100, n=3, seed=1))
        await anext(stream)
        stream.cancel(1)
        output = await stream.result()
        assert [one.finish_reason for one in output.completions] == ["length", "cancelled", "length"]

    loop.run(run())


@pytest.mark.parametrize("way", ["break", "forget", "close", "raise"])
def test_a_stream_that_is_left_is_cancelled(loop: asyncio.Runner, engine: AsyncEngine, way: str) -> None:
    async def leave() -> None:
        stream = await long_request(engine)
        if way == "break":
            async for _ in stream:
                break
        elif way == "close":
            await anext(stream)
            await stream.aclose()
            assert [token async for token in stream] == []
        elif way == "raise":
            with pytest.raises(KeyError):
                async with stream:
                    raise KeyError

    async def run() -> None:
        await leave()
        gc.collect()
        await asyncio.sleep(0)  # a forgotten one has the loop cancel it
        await assert_clean(engine)

    loop.run(run())


def test_a_submission_that_is_given_up_is_cancelled(loop: asyncio.Runner, engine: AsyncEngine) -> None:
    async def run() -> None:
        submission = asyncio.create_task(long_request(engine, n=2))
        await asyncio.sleep(0)  # it is sent, and waits for its answer
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
        await stats(engine)  # the answer to the submission has come, and was answered with a cancellation
        await assert_clean(engine)

    loop.run(run())
