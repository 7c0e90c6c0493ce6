"""One life of the engine's process, as its client sees it: from its start to its end, whatever that is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

import zmq
import zmq.asyncio

from octavo.engine import messages
from octavo.settings import Settings

_LAST_WORDS_SECONDS = 0.2
"""How long messages are waited for that a process sent before it ended."""


class EngineFailed(RuntimeError):
    """The engine's process could not start, and why."""


class EngineDied(RuntimeError):
    """The engine's process is not there, or ended while it had the request; it is being started again."""


class Child:
    """The process, and the socket to it."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, folder: str) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(
        cls, settings: Settings, on_loaded: Callable[[messages.Loaded], None]
    ) -> tuple[Child, messages.EngineInfo]:
        """Start the process and wait until it serves; `on_loaded` is told of the model before. Raises EngineFailed."""
        folder = tempfile.mkdtemp(prefix="octavo-")  # nobody else may enter it
        address = f"ipc://{folder}/engine"
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        child = None
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.set(option, 0)
            socket.bind(address)
            command = (sys.executable, "-P", "-m", "octavo.engine.process", address)
            child = cls(await _spawn(*command), socket, folder)
            given = settings.model_dump(mode="json", exclude_unset=True, exclude={"api_key"})
            socket.send(
                messages.encode(messages.Start(given, dict(settings.sources)))
            )  # it goes out when the process has connected
            return child, await child._ready(on_loaded)
        except BaseException:
            if child is not None:
                await child.end(0)
            socket.close(0)
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _ready(self, on_loaded: Callable[[messages.Loaded], None]) -> messages.EngineInfo:
        while (message := await self.receive()) is not None:
            if isinstance(message, messages.Ready):
                return message.info
            if isinstance(message, messages.Failed):
                raise EngineFailed(message.reason)
            if isinstance(message, messages.Loaded):
                on_loaded(message)
        raise EngineFailed(f"the engine's process {self.obituary} while it started")

    async def receive(self) -> messages.FromEngine | None:
        """The next message; None when it has ended and all is taken. Raises MsgspecError for what is no message."""
        received = asyncio.ensure_future(self._socket.recv())
        try:
            if not received.done():
                await asyncio.wait((received, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait((received,), timeout=_LAST_WORDS_SECONDS)
            return messages.decode_from_engine(received.result()) if received.done() else None
        finally:
            received.cancel()

    def send(self, message: object) -> None:
        """Send at once; what a process that has ended does not take is dropped."""
        sent = asyncio.ensure_future(self._socket.send(messages.encode(message), zmq.NOBLOCK))
        if sent.done() and not sent.cancelled():
            sent.exception()

    @property
    def alive(self) -> bool:
        """Is the process there?"""
        return self._process.returncode is None

    @property
    def obituary(self) -> str:
        """How it ended, to go on after "the process"."""
        status = self._process.returncode
        if status is None:
            return "runs"
        if status >= 0:
            return f"ended with status {status}"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
        return f"was ended by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")

    async def end(self, seconds: float) -> None:
        """Ask it to end, and end it if it has not within so many seconds; frees all that it took."""
        try:
            if self._process.returncode is None and seconds > 0:
                self.send(messages.Stop())
                await asyncio.wait((self._ended,), timeout=seconds)
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._ended
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._socket.close(0)
            shutil.rmtree(self._folder, ignore_errors=True)


async def _spawn(*command: str) -> Process:
    """Start a process whose stdin ends with this one. Cancelled halfway, it would leave one that nobody knows."""
    spawning = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, stdin=PIPE))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        process = await spawning
        process.kill()
        await process.wait()
        raise
