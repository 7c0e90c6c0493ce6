"""How long a request may wait for the engine, with an engine that is told what to do."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo import SamplingParams
from octavo.async_engine import AsyncEngine, EngineDied, RequestStream
from octavo.generation import Generation
from octavo.outputs import RequestOutput
from octavo.request_stream import Running
from octavo.server.errors import ApiError
from octavo.server.limits import Deadline
from octavo.server.meter import Meter
from octavo.server.service import Caller, Service
from octavo.settings import Settings


class Queue:
    """An engine that takes requests and runs none by itself."""

    tokenizer = None
    info = SimpleNamespace(block_size=16, max_total_tokens=100, max_input_tokens=99, max_batch_total_tokens=100)

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.cancelled: list[Running] = []

    async def submit(self, prompt: list[int], params: SamplingParams, **names: str) -> RequestStream:
        generation = Generation(RequestOutput(None, prompt, []), params, None, streaming=True)
        self.running.append(Running(generation, b"", "", leave=lambda: None))
        return RequestStream(self.running[-1], lambda running, _: self.cancelled.append(running))


def ask(queue: Queue, seconds: float | None) -> Any:
    """Two prompts of one request."""
    service = Service(cast(AsyncEngine, queue), Settings(max_queue_seconds=seconds))
    return service.running([[1], [2]], SamplingParams(), Caller("", "", Deadline(), {}), None, Meter())


def test_nobody_waits_longer() -> None:
    async def work() -> None:
        queue = Queue()
        with pytest.raises(ApiError) as told:
            async with ask(queue, 0.001):
                pytest.fail("it does not run")
        assert (told.value.status_code, told.value.kind) == (429, "queue_timeout")
        assert queue.cancelled == queue.running[::-1]

    asyncio.run(work())


@pytest.mark.parametrize("which", [0, 1])
def test_one_that_runs_is_enough(which: int) -> None:
    """From then on there is no limit."""

    async def work() -> None:
        queue = Queue()
        async with AsyncExitStack() as stack:
            entering = asyncio.create_task(stack.enter_async_context(ask(queue, 3600)))
            while len(queue.running) < 2:
                await asyncio.sleep(0)
            assert not entering.done()
            queue.running[which].begun.set()
            assert len(await entering) == 2
            assert queue.cancelled == []

    asyncio.run(work())


def test_an_engine_that_dies_ends_the_wait() -> None:
    async def work() -> None:
        queue = Queue()
        async with AsyncExitStack() as stack:
            entering = asyncio.create_task(stack.enter_async_context(ask(queue, 3600)))
            while len(queue.running) < 2:
                await asyncio.sleep(0)
            for running in queue.running:
                running.fail(EngineDied("it was killed"))
            for stream in await entering:
                with pytest.raises(EngineDied):
                    await stream.result()

    asyncio.run(work())


def test_without_a_limit_nothing_is_waited_for() -> None:
    async def work() -> None:
        async with ask(Queue(), None) as streams:
            assert len(streams) == 2

    asyncio.run(work())
