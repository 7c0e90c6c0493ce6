"""Engines in processes of their own, for tests, and an event loop that lives as long as they."""

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo import AsyncEngine
from octavo.async_engine import EngineStats, RequestStream
from octavo.settings import Settings
from tests.test_llm import BLOCK, greedy, prompt_of

PATIENCE = 120
"""Seconds after which a test gives up on what must come; nothing waits for it to pass."""


async def start(folder: Path, **settings: Any) -> AsyncEngine:
    defaults = {"block_size": BLOCK, "max_batch_total_tokens": 8192, "device": "cpu", "engine_restart_seconds": 0.01}
    return await AsyncEngine.start(Settings(model_id=str(folder), **defaults | settings))


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """An engine, within a time that no test may take."""
    async with asyncio.timeout(2 * PATIENCE), await start(folder, **settings) as engine:
        yield engine


async def stats(engine: AsyncEngine) -> EngineStats:
    """The engine answers in the order of what it is sent: all that was sent before is done."""
    now = await engine.stats()
    assert now.blocks_free + now.blocks_cached + now.blocks_held == now.blocks_total
    return now


async def assert_clean(engine: AsyncEngine) -> None:
    now = await stats(engine)
    assert (now.running, now.waiting, now.blocks_held) == (0, 0, 0)


async def long_request(engine: AsyncEngine, seed: int = 0, tokens: int = 900, **params: Any) -> RequestStream:
    """One that runs for as long as a test needs it to."""
    return await engine.submit(prompt_of(20, seed), greedy(tokens, **params), request_id=f"long {seed}")


def kill(engine: AsyncEngine) -> None:
    os.kill(engine.info.process_id, signal.SIGKILL)


def has_ended(process_id: int) -> bool:
    """Waits for a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE)[0])
    finally:
        os.close(descriptor)
