"""HTTP from its start to its end: uvicorn, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from octavo.async_engine import AsyncEngine
from octavo.server.app import create_app
from octavo.server.protocol import Protocol
from octavo.settings import Settings

logger = logging.getLogger(__name__)

_LAST_SECONDS = 5.0
"""After the grace time, for the last answers to reach their clients."""


class Server(uvicorn.Server):
    """Ends after the running requests at the first signal, and at once at the second."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        grace = settings.graceful_termination_timeout
        super().__init__(
            uvicorn.Config(
                create_app(engine, settings),
                http=Protocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,  # more than the clients' own, who would else write to a closed connection
                timeout_graceful_shutdown=int(grace + _LAST_SECONDS),
            )
        )
        self._engine, self._grace = engine, grace
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would end the process by the signal, and so with another exit status."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def drained(self) -> None:
        """Wait until the engine has ended that `stop` drains: the event loop must not go before its process does."""
        if self._drain is not None and not self.force_exit:
            await self._drain

    def stop(self) -> None:
        """Take no new requests and let the running ones finish; asked again, end at once."""
        if self.should_exit:
            logger.warning("asked again: ending at once")
            self.force_exit = True
            return
        logger.info("shutting down: running requests have %g s to finish", self._grace)
        self.should_exit = True
        self._drain = asyncio.get_running_loop().create_task(self._engine.drain(self._grace))
