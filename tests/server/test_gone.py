"""A client that goes: what it held is free before the engine's next step, wherever its request was."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from octavo.async_engine import EngineStats
from tests.checkpoints import EOS
from tests.server.live import Live, hung, until

MOST = {"max_tokens": 22_000, "logit_bias": {str(EOS): -100}}
"""Longer than any test waits."""
CHAT = [{"role": "user", "content": "count"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", MOST | {"prompt": "count"}),
    "two prompts": ("/v1/completions", MOST | {"prompt": ["count", "further"]}),
    "two answers": ("/v1/completions", MOST | {"prompt": "count", "n": 2}),
    "chat": ("/v1/chat/completions", MOST | {"messages": CHAT}),
    "two answers in a chat": ("/v1/chat/completions", MOST | {"messages": CHAT, "n": 2}),
    "generate": ("/generate", {"inputs": "count", "parameters": {"max_new_tokens": 22_000}}),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.async_engine.ANSWER_SECONDS", 120)


@contextmanager
def stopped(server: Live) -> Iterator[None]:
    """The engine's process stands still; then it takes what has arrived meanwhile, in its order, before it goes on."""
    process = server.service.engine.info.process_id
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def asked(server: Live) -> Future[EngineStats]:
    """The numbers, for which has been asked when this returns."""
    answer = asyncio.run_coroutine_threadsafe(server.service.engine.stats(), server.loop)
    server.run(asyncio.sleep(0))
    return answer


def now(server: Live) -> EngineStats:
    stats: EngineStats = server.run(server.service.engine.stats())
    return stats


def goes(server: Live, route: str, body: dict[str, Any], at: Callable[[EngineStats], bool], others: int = 0) -> None:
    """Ask, go at that point, and see what the engine had just before it was told so, and just after."""
    with hung(server, route, body) as connection:
        until(lambda: at(now(server)))
        with stopped(server):
            before = asked(server)
            connection.close()
            until(lambda: server.service.admission.taken == others)
            after = asked(server)
    there, left = before.result(120), after.result(120)
    assert at(there), "the engine was stopped where it was to be"
    assert there.running + there.waiting > others
    assert left.steps - there.steps <= 1
    assert (left.running, left.waiting) == (others, 0)
    if not others:
        assert there.blocks_held > left.blocks_held == 0
    assert left.blocks_free + left.blocks_cached + left.blocks_held == left.blocks_total


def variants(name: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
    route, body = REQUESTS[name]
    if route == "/generate":
        return ("/generate_stream" if stream else route), body
    return route, body | {"stream": stream}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
def test_while_tokens_come(tight: Live, name: str, stream: bool) -> None:
    """Of two sequences one runs, the other waits."""
    tokens = now(tight).decode_tokens
    goes(tight, *variants(name, stream=stream), lambda stats: stats.decode_tokens > tokens + 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["completion", "two prompts", "two answers", "chat", "generate"])
def test_while_its_prompt_is_computed(tight: Live, name: str, stream: bool) -> None:
    """9000 tokens take more than 500 steps."""
    route, body = variants(name, stream=stream)
    long = os.urandom(2250).hex() * 2
    field = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}.get(route, "inputs")
    changed = {"messages": [{"role": "u", "content": long}], "inputs": long, "prompt": long}[field]
    if isinstance(body.get("prompt"), list):
        changed = [long, "further"]
    sequences, before = 2 if name.startswith("two") else 1, now(tight)

    def in_its_prompt(stats: EngineStats) -> bool:
        begun = stats.prefill_tokens > before.prefill_tokens and stats.running + stats.waiting == sequences
        return begun and stats.decode_tokens == before.decode_tokens

    goes(tight, route, body | {field: changed}, in_its_prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["completion", "chat", "generate"])
def test_while_it_waits(tight: Live, name: str, stream: bool) -> None:
    with ExitStack() as other:
        other.enter_context(hung(tight, *variants("completion", stream=True)))
        until(lambda: now(tight).running == 1)
        goes(tight, *variants(name, stream=stream), lambda stats: stats.waiting == 1, others=1)
    until(lambda: tight.held() == (0, 0) and tight.service.admission.taken == 0)
