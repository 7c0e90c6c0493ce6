"""Keeps the engine's process alive: starts it, reads from it, starts another one when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from octavo.engine import messages
from octavo.engine.child import Child, EngineDied, EngineFailed
from octavo.models.source import require
from octavo.settings import Settings

logger = logging.getLogger(__name__)

LONGEST_BACKOFF = 60.0
"""Seconds between two starts, at most."""


class Supervisor:
    """One engine's processes, of which one lives at a time."""

    def __init__(
        self, settings: Settings, take: Callable[[messages.FromEngine], None], lose: Callable[[str], None]
    ) -> None:
        """`take` gets each message, `lose` is called with the reason when the process has ended."""
        self.info: messages.EngineInfo
        self.down = "the engine has not started"
        """Why no process is there, while none is."""
        self.loaded: asyncio.Future[messages.Loaded] = asyncio.get_running_loop().create_future()
        """What the first process says of the model; later ones say the same."""
        self.restarts = 0
        """In a row: whoever sees that the engine works sets it to 0."""
        self._settings = settings
        self._take = take
        self._lose = lose
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while a process serves, and when none will any more."""

    async def start(self) -> None:
        """Start the first process and wait until it serves. Raises EngineFailed with its reason, or ModelNotFound."""
        require(self._settings)  # a wrong name is told at once, not when the process has imported what it needs
        self._child, self.info = await Child.start(self._settings, self._load)
        self._settled.set()
        self._task = asyncio.create_task(self._supervise(self._child))

    @property
    def healthy(self) -> bool:
        """Is a process there that serves?"""
        return self._child is not None and self._child.alive

    async def wait_healthy(self) -> None:
        """Wait until a process serves. Raises EngineDied if none will be started any more."""
        await self._settled.wait()
        if self._child is None:
            raise EngineDied(self.down)

    def send(self, message: object) -> None:
        """Send to the process. Raises EngineDied when none is there."""
        if self._child is None:
            raise EngineDied(self.down)
        self._child.send(message)

    async def close(self, seconds: float) -> None:
        """End the process: ask it, and end it if it has not after so many seconds."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        child, self._child = self._child, None
        self._settled.set()
        self.down = "the engine was shut down"
        if child is not None:
            await child.end(seconds)

    def _load(self, message: messages.Loaded) -> None:
        if not self.loaded.done():
            self.loaded.set_result(message)

    async def _supervise(self, first: Child) -> None:
        child: Child | None = first
        while child is not None:
            try:
                reason = await self._serve(child)
            except Exception as error:
                logger.exception("what the engine sent could not be handled")
                reason = f"was ended after an error of its client: {type(error).__name__}: {error}"
            self._child = None
            self._settled.clear()
            again = self.restarts < self._settings.engine_restarts
            self.down = f"the engine's process {reason}{'; it is started again' if again else ''}"
            await child.end(0)
            self._lose(self.down)
            child = self._child = await self._restart()
            self._settled.set()

    async def _serve(self, child: Child) -> str:
        """Hand out what the process sends; returns why it has ended."""
        reason = None
        while True:
            try:
                message = await child.receive()
            except msgspec.MsgspecError as error:
                logger.warning("the engine sent what is no message: %s", error)
                continue
            if message is None:
                return reason or child.obituary
            if isinstance(message, messages.Failed):
                reason = f"ended: {message.reason}"
            self._take(message)
            await asyncio.sleep(0)  # messages that wait already must not keep the loop from all else

    async def _restart(self) -> Child | None:
        limit, first = self._settings.engine_restarts, self._settings.engine_restart_seconds
        while self.restarts < limit:
            seconds = min(first * 2**self.restarts, LONGEST_BACKOFF)
            self.restarts += 1
            logger.error("%s, in %.1f s (%d of %d)", self.down, seconds, self.restarts, limit)
            await asyncio.sleep(seconds)
            try:
                child, self.info = await Child.start(self._settings, self._load)
            except EngineFailed as error:
                self.down = f"the engine could not be started again: {error}"
            else:
                logger.warning("the engine is there again")
                return child
        self.down += f"; no further start follows, engine_restarts is {limit}"
        logger.error(self.down)
        return None
