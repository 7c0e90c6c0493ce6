"""The engine in a process of its own, for asyncio: requests go there, their text is put together here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine import messages
from octavo.engine.child import EngineDied, EngineFailed
from octavo.engine.messages import BLOCK_STATES, CacheSnapshot, EngineInfo, EngineStats
from octavo.engine.request import FinishReason
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.engine.supervisor import Supervisor
from octavo.engine.suspects import RequestPoisoned, Suspects
from octavo.engine.tokenizer import read_tokenizer
from octavo.engine.wire import fingerprint, prompt_bytes, unpack
from octavo.generation import Generation
from octavo.hooks import StepStats
from octavo.outputs import RequestOutput
from octavo.request_stream import RequestStream, Running, mark_begun
from octavo.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BLOCK_STATES", "AsyncEngine", "CacheSnapshot", "Draining", "EngineDied", "EngineFailed", "EngineInfo",
    "EngineStats", "RequestPoisoned", "RequestRefused", "RequestStream",
]  # fmt: skip

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long an answer is waited for that should take no longer than a step."""
STOP_SECONDS = 5.0
"""How long the process has to end by itself."""


class Draining(RuntimeError):
    """No new requests are taken: the engine is being shut down."""


class AsyncEngine:
    """A model in a process of its own. One event loop uses it; how long a step takes does not hold that up.

    When the process dies, its requests raise EngineDied and it is started again, later each time (see the settings
    `engine_restarts` and `engine_restart_seconds`). No request is repeated: whoever sent it decides that.
    """

    tokenizer: PreTrainedTokenizerBase | None
    """The model's, as `LLM.tokenizer`."""

    def __init__(self, settings: Settings) -> None:
        """Nothing runs yet: use `start`."""
        self.draining = False
        self.on_step: Callable[[StepStats], None] | None = None
        """Called with the numbers of each step."""
        self._supervisor = Supervisor(settings, self._take, self._lose)
        self._suspects = Suspects()
        self._tickets = itertools.count()
        self._submitted: dict[int, Running] = {}
        """Sent, and not answered; by ticket."""
        self._running: dict[int, Running] = {}
        """By the number of each sequence in the engine."""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._idle = asyncio.Event()
        self._last_stats = EngineStats()

    @classmethod
    async def start(cls, settings: Settings) -> AsyncEngine:
        """Start the process and wait until it serves. Raises EngineFailed with the reason if it cannot."""
        engine = cls(settings)
        supervisor = engine._supervisor
        tasks = (
            asyncio.create_task(supervisor.start()),
            asyncio.create_task(read_tokenizer(supervisor.loaded, settings)),
        )
        try:
            _, engine.tokenizer = await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                if not task.cancelling():  # asked twice it would leave what it is ending behind
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.close()
            if isinstance(error, ValueError | OSError):
                raise EngineFailed(str(error)) from error
            raise
        await engine.stats()  # so that there are last known numbers
        return engine

    @property
    def info(self) -> EngineInfo:
        """What is served, and how."""
        return self._supervisor.info

    @property
    def healthy(self) -> bool:
        """Does the process serve? Not from its death until another one is ready."""
        return self._supervisor.healthy

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
        request_id: str = "",
        trace: str = "",
    ) -> RequestStream:
        """Send a request; it is queued in the engine on return.

        Cached prefixes never cross tenants; `cache_salt` divides further within one. `request_id` is for the log,
        `trace`, a W3C `traceparent`, for those who trace requests.
        Raises RequestRefused, with the numbers, if it can never be served; Draining; EngineDied.
        """
        prompt, encoded = prompt_bytes(prompt_token_ids), msgspec.Raw(msgspec.msgpack.encode(params))
        mark = fingerprint(prompt, params, tenant)
        generation = Generation(RequestOutput(None, list(prompt_token_ids), []), params, self.tokenizer, streaming=True)
        running = Running(generation, mark, request_id, leave=await self._suspects.enter(mark))
        ticket = next(self._tickets)
        try:
            if self.draining:
                raise Draining("the engine is being shut down and takes no new requests")
            self._supervisor.send(messages.Submit(ticket, prompt, encoded, tenant, cache_salt, request_id, trace))
        except BaseException:
            running.leave()
            raise
        self._submitted[ticket] = running
        self._tell_if_idle()
        try:
            await running.accepted
        except asyncio.CancelledError:
            self._cancel(running)
            raise
        return RequestStream(running, self._cancel)

    async def wait_healthy(self) -> None:
        """Wait until the process serves. Raises EngineDied if none will be started any more."""
        await self._supervisor.wait_healthy()

    async def stats(self) -> EngineStats:
        """The numbers as they stand; the last known ones while the engine is down, or in a long step."""
        with contextlib.suppress(TimeoutError, EngineDied):
            self._last_stats = await self._ask(messages.AskStats)
        return self._last_stats

    async def snapshot(self, most: int = 1000) -> CacheSnapshot:
        """Every block, the prefix tree and who uses it. Raises EngineDied, or TimeoutError behind a long step."""
        snapshot: CacheSnapshot = await self._ask(messages.AskSnapshot, most)
        return snapshot

    async def drain(self, grace_seconds: float) -> None:
        """Take no new requests, let those that run finish for so long, then close."""
        self.draining = True
        self._tell_if_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        await self.close()

    async def close(self, seconds: float = STOP_SECONDS) -> None:
        """End the process, by itself or after so long; what still runs raises EngineDied. May be called again."""
        self.draining = True
        await self._supervisor.close(seconds)
        self._fail_all(self._supervisor.down)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Forget a sequence by its number in the engine; for `Generation`."""
        self._running.pop(request_id, None)
        with contextlib.suppress(EngineDied):
            self._supervisor.send(messages.Cancel(request_id, reason.value))
        self._tell_if_idle()

    def _cancel(self, running: Running, index: int | None = None) -> None:
        running.cancelled = not running.accepted.done() or running.accepted.cancelled()
        running.generation.abandon(self, index)
        running.wake()
        if not running.generation.sequences:
            running.leave()

    def _tell_if_idle(self) -> None:
        if not self._running and not self._submitted:
            self._idle.set()
        else:
            self._idle.clear()

    async def _ask(self, question: Callable[..., object], *arguments: object) -> Any:
        ticket = next(self._tickets)
        self._supervisor.send(question(ticket, *arguments))
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        finally:
            self._asked.pop(ticket, None)

    def _requests(self) -> set[Running]:
        return {*self._running.values(), *self._submitted.values()}

    def _lose(self, reason: str) -> None:
        """The process has ended: its requests fail, and are remembered."""
        lost = self._requests()
        if lost:
            logger.error("%d requests were lost with it: %s", len(lost), ", ".join(one.request_id for one in lost))
        self._suspects.blame({running.fingerprint: running.queue_seconds is not None for running in lost})
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for running in self._requests():
            running.fail(EngineDied(reason))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineDied(reason))
        self._running.clear()
        self._submitted.clear()
        self._tell_if_idle()

    # What the process sends

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Outputs():
                self._take_outputs(message)
            case messages.Accepted():
                self._accept(message)
            case messages.Began():
                mark_begun(self._running, message.sequences)
            case messages.Refused():
                if (running := self._submitted.pop(message.ticket, None)) is not None:
                    self._suspects.acquit(running.fingerprint)
                    running.fail(RequestRefused(message.reason))
                self._tell_if_idle()
            case EngineStats() | CacheSnapshot():
                answer = self._asked.get(message.ticket)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case messages.Invalid():
                logger.error("the engine dropped a message: %s", message.reason)

    def _accept(self, message: messages.Accepted) -> None:
        running = self._submitted.pop(message.ticket)
        self._running |= dict.fromkeys(message.sequences, running)
        try:
            running.generation.begin(message.sequences)
        except Exception as error:
            self._spoilt(running, message.sequences, error)
        if running.cancelled:
            self._cancel(running)
        elif not running.accepted.done():
            running.accepted.set_result(None)

    def _take_outputs(self, outputs: messages.Outputs) -> None:
        for output in unpack(outputs):
            running = self._running.get(output.request_id)
            if running is None:  # cancelled while the step ran
                continue
            running.queue_seconds = output.queue_seconds
            running.begun.set()
            running.leave()
            try:
                running.generation.take(self, output)
            except Exception as error:
                self._spoilt(running, list(running.generation.sequences), error)
            running.wake()
            if output.request_id not in running.generation.sequences:
                self._running.pop(output.request_id, None)
                self._ended(running)
        if self.on_step is not None:
            try:
                self.on_step(outputs.step)
            except Exception:
                logger.exception("on_step raised, and is not called again")
                self.on_step = None

    def _spoilt(self, running: Running, sequences: Sequence[int], error: Exception) -> None:
        """Its text cannot be put together: no affair of the others."""
        logger.error("the text of request %s could not be put together", running.request_id, exc_info=error)
        for sequence in sequences:
            self.cancel(sequence)
        running.fail(error)

    def _ended(self, running: Running) -> None:
        if not running.generation.sequences:
            self._suspects.acquit(running.fingerprint)
            self._supervisor.restarts = 0
        self._tell_if_idle()
