"""What the routes share: a prompt's way from text through the checks into the engine, and its count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from octavo import SamplingParams
from octavo.grammar import Grammar
from octavo.hooks import GrammarRefused
from octavo.outputs import RequestOutput, StreamedToken
from octavo.plugins import plugins
from octavo.server import errors
from octavo.server.limits import Admission, Deadline, seconds_allowed
from octavo.server.meter import Meter
from octavo.server.metrics import Metrics
from octavo.server.text import Texts
from octavo.settings import Settings

if TYPE_CHECKING:
    from octavo.async_engine import AsyncEngine, RequestStream


_TGI_FIELDS = ("inputs", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how long they wait."""

    tenant: str
    request_id: str
    deadline: Deadline
    log: dict[str, object]
    """Goes into the request's line of the log."""
    trace: str = ""
    """The client's `traceparent`, or nothing."""
    fields: tuple[str, str] = _TGI_FIELDS
    """What the request calls the prompt and the answer's length."""
    arrived: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class Service:
    """A running server's parts."""

    engine: AsyncEngine
    settings: Settings
    texts: Texts = field(init=False)
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    _grammars: ThreadPoolExecutor = field(init=False)
    """One thread: grammars that take long wait for each other, and no tokenizer waits for them."""

    def __post_init__(self) -> None:
        self.texts = Texts(self.engine.tokenizer, self.settings.validation_workers)
        self.admission = Admission(self.settings.max_concurrent_requests)
        self.metrics = Metrics(self.engine.info)
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.engine.on_step = self.metrics.observe_step

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return self.engine.info.model

    def caller(self, request: Request, fields: tuple[str, str] = _TGI_FIELDS) -> Caller:
        """Who asks, by these names for the prompt and the answer's length. Raises the 422 of a wrong deadline."""
        state = request.scope["state"]
        deadline = Deadline(seconds_allowed(request, self.settings.request_timeout))
        return Caller(state["tenant"], state["request_id"], deadline, state["log"], state["trace"], fields)

    @contextmanager
    def counted(self, caller: Caller, sequences: int) -> Iterator[Meter]:
        """Hold places for a request's sequences while it runs, and measure it."""
        meter = Meter(started=caller.arrived)
        with self.metrics.request(meter, caller.deadline):
            try:
                with self.admission.places(sequences):
                    yield meter
            finally:
                caller.log.update(
                    prompt_tokens=meter.prompt_tokens,
                    cached_tokens=meter.cached_tokens,
                    generated_tokens=meter.generated_tokens,
                    **meter.seconds(),
                )

    async def check_grammar(self, grammar: Grammar | None, field: str) -> None:
        """Raises the 422 of one that cannot be enforced, before it reaches the engine."""
        if grammar is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._grammars, lambda: plugins().logits_processors(SamplingParams(grammar=grammar), None)
            )
        except GrammarRefused as error:
            raise errors.invalid(f"`{field}`: {error}", field) from None

    def check_length(self, prompt: Sequence[int], max_tokens: int | None, caller: Caller) -> None:
        """Raises TGI's 422 for a prompt, or prompt and answer, above the limits."""
        info, length, (inputs, most) = self.engine.info, len(prompt), caller.fields
        if max_tokens is not None and length + max_tokens > info.max_total_tokens:
            raise errors.invalid(
                f"`{inputs}` tokens + `{most}` must be <= {info.max_total_tokens}. "
                f"Given: {length} `{inputs}` tokens and {max_tokens} `{most}`",
                most,
            )
        if length > info.max_input_tokens:
            raise errors.invalid(
                f"`{inputs}` must have at most {info.max_input_tokens} tokens. Given: {length}", inputs
            )

    @asynccontextmanager
    async def running(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, caller: Caller, salt: str | None, meter: Meter
    ) -> AsyncIterator[list[RequestStream]]:
        """The prompts in the engine; what still runs of them at the end is cancelled.

        With a limit to their time in the queue they run on entry. Raises the 429 where none of them did in time.
        """
        for prompt in prompts:
            self.check_length(prompt, params.max_tokens, caller)
        meter.prompt_tokens, meter.max_new_tokens = sum(map(len, prompts)), params.max_tokens
        meter.submit()
        async with AsyncExitStack() as stack:
            streams = []
            limit = self.settings.max_queue_seconds
            try:
                async with asyncio.timeout(limit):
                    for prompt in prompts:
                        stream = await self.engine.submit(
                            prompt, params, tenant=caller.tenant, cache_salt=salt or "", request_id=caller.request_id,
                            trace=caller.trace,
                        )  # fmt: skip
                        streams.append(await stack.enter_async_context(stream))
                    if limit is not None:
                        await _one_begins(streams)
            except TimeoutError:
                raise errors.queued_too_long(limit or 0) from None
            yield streams


async def _one_begins(streams: Sequence[RequestStream]) -> None:
    """Wait until one of them runs."""
    waiting = [asyncio.create_task(stream.begun()) for stream in streams]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def tokens(stream: RequestStream, meter: Meter) -> AsyncIterator[StreamedToken]:
    """A prompt's tokens as they come, counted. Raises the 424 where one of its sequences failed."""
    first = True
    async for token in stream:
        if first:
            meter.cached_tokens += token.cached_tokens
            meter.queue = max(meter.queue, stream.queue_seconds or 0.0)
            first = False
        if token.token_id is not None:
            meter.token()
        if token.error is not None:
            raise errors.failed(token.error)
        if token.finish_reason == "cancelled":
            raise errors.cancelled()
        yield token


async def result(stream: RequestStream, meter: Meter) -> RequestOutput:
    """A prompt's answers, whole."""
    async for _ in tokens(stream, meter):
        pass
    return await stream.result()
