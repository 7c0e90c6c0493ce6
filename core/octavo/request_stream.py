"""One request that runs in the engine's process, and the stream of its tokens that its user holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from octavo.generation import Generation
from octavo.outputs import RequestOutput, StreamedToken


@dataclass(slots=True, eq=False)
class Running:
    """What the client keeps of a request. It does not know its stream, so that a stream nobody holds can go."""

    generation: Generation
    fingerprint: bytes
    """The same for the same prompt and parameters: to know it again when it comes back."""
    request_id: str
    """Its user's name for it, for the log."""
    leave: Callable[[], None]
    """Lets the next suspect in: see `octavo.engine.suspects`."""
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    readers: list[asyncio.Future[None]] = field(default_factory=list)
    """Those who wait for something to come: an asyncio.Event does as much, at a higher price for each token."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it waits no longer: it runs, or has failed."""
    queue_seconds: float | None = None
    error: Exception | None = None
    """Why nothing more comes."""
    cancelled: bool = False
    """Before the engine had answered."""

    def fail(self, error: Exception) -> None:
        """Nothing more comes: who waits for it is told why."""
        self.error = error
        self.leave()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # whoever submitted it may have gone
        self.generation.sequences.clear()
        self.begun.set()
        self.wake()

    async def more(self) -> None:
        """Wait until something comes."""
        reader = asyncio.get_running_loop().create_future()
        self.readers.append(reader)
        await reader

    def wake(self) -> None:
        """Something came."""
        for reader in self.readers:
            if not reader.done():
                reader.set_result(None)
        self.readers.clear()


def mark_begun(running: Mapping[int, Running], sequences: Iterable[int]) -> None:
    """Tell those who wait that their sequences run; one that was cancelled meanwhile has nobody."""
    for sequence in sequences:
        if (one := running.get(sequence)) is not None:
            one.begun.set()


class RequestStream(AsyncIterator[StreamedToken]):
    """The tokens of one request as they come, with their text. Closed, left or forgotten, it cancels what still runs.

    Reading raises EngineDied if the engine's process ends, behind the tokens that came before. Nothing is lost by
    reading slowly: what waits here is bounded by the request's own length.
    """

    def __init__(self, running: Running, cancel: Callable[[Running, int | None], None]) -> None:
        self._running = running
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()

    @property
    def output(self) -> RequestOutput:
        """What came so far: prompt, cached tokens, log-probabilities of the prompt, completions."""
        return self._running.generation.output

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited in the engine before its first step; None until something came."""
        return self._running.queue_seconds

    async def begun(self) -> None:
        """Wait until the engine runs it, or it has failed.

        Where `max_queue_seconds` is not set, the engine does not tell until the first token has come.
        """
        await self._running.begun.wait()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamedToken:
        running = self._running
        while True:
            if running.generation.arrived:
                return running.generation.arrived.popleft()
            if running.error is not None:
                raise running.error
            if not running.generation.sequences:
                raise StopAsyncIteration
            await running.more()

    async def result(self) -> RequestOutput:
        """Read to the end and give all of it: the `n` best of its sequences, the likeliest first when more ran."""
        async for _ in self:
            pass
        return self._running.generation.result()

    def cancel(self, index: int | None = None) -> None:
        """Take what still runs out of the engine, or the sequence `index` alone; its blocks are free within a step."""
        self._cancel(self._running, index)

    async def aclose(self) -> None:
        """Cancel what still runs; nothing more comes."""
        self.cancel()
        self._running.generation.arrived.clear()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The garbage collector may come in any thread, and after the loop has ended.
        if self._running.generation.sequences and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, self._running, None)
