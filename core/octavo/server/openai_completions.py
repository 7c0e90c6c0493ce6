"""/v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec
from fastapi import APIRouter, Request, Response

from octavo import SamplingParams
from octavo.outputs import Completion as Answer
from octavo.outputs import RequestOutput, StreamedToken, TokenLogprob
from octavo.server import errors
from octavo.server.meter import Meter
from octavo.server.openai import Head, completion_logprobs, encode, reason, respond, usage
from octavo.server.openai_answers import Completion, CompletionChoice
from octavo.server.openai_schema import CompletionRequest, sampling
from octavo.server.schema import responses
from octavo.server.service import Caller, Service, result, tokens
from octavo.server.sse import DONE, event

if TYPE_CHECKING:
    from octavo.async_engine import RequestStream


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of a request's prompts."""

    text: str | None
    ids: list[int]


def routes(service: Service) -> APIRouter:
    """The route, bound to a running server."""
    router = APIRouter(tags=["OpenAI"], default_response_class=Response)

    @router.post("/v1/completions", responses=responses(Completion, stream=Completion, openai=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await respond(service, request, body, "cmpl", _events, _complete)

    return router


def _given(service: Service, body: CompletionRequest) -> list[str | list[int]]:
    """The prompts as a list, whichever of the four ways they were given in."""
    prompt = body.prompt
    given: list[str | list[int]]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        given = [prompt]
    else:
        given = [*cast("list[str | list[int]]", prompt)]
    if len(given) > (most := service.settings.max_client_batch_size):
        raise errors.invalid(
            f"batch size exceeded: `prompt` may have {most} prompts (max_client_batch_size). Given: {len(given)}",
            "prompt",
        )
    return given


async def _prompts(service: Service, given: Sequence[str | list[int]], meter: Meter) -> list[Prompt]:
    meter.characters = sum(len(one) for one in given if isinstance(one, str))
    return [
        Prompt(one, await service.texts.encode(one)) if isinstance(one, str) else Prompt(None, one) for one in given
    ]


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    params = sampling(body, service.settings, body.logprobs, body.best_of)
    if body.echo and body.stream:
        raise errors.invalid("`echo` is not supported when streaming tokens", "echo")
    if body.echo and body.logprobs is not None:
        return msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return params


async def _complete(service: Service, body: CompletionRequest, caller: Caller, head: Head) -> tuple[Meter, Completion]:
    given = _given(service, body)
    with service.counted(caller, len(given) * max(body.n or 1, body.best_of or 1)) as meter:
        params = _params(service, body)
        await service.check_grammar(params.grammar, "response_format")
        prompts = await _prompts(service, given, meter)
        ids = [prompt.ids for prompt in prompts]
        async with service.running(ids, params, caller, body.cache_salt, meter) as running:
            outputs = [await result(one, meter) for one in running]
        meter.end()
    answers = [
        (prompt, output, completion)
        for prompt, output in zip(prompts, outputs, strict=True)
        for completion in output.completions
    ]
    choices = [_choice(service, body, number, *one) for number, one in enumerate(answers)]
    return meter, Completion(head.id, head.created, head.model, head.system_fingerprint, choices, usage(meter))


def _choice(
    service: Service, body: CompletionRequest, number: int, prompt: Prompt, output: RequestOutput, completion: Answer
) -> CompletionChoice:
    ids, logprobs = completion.token_ids, list[TokenLogprob | None](completion.logprobs or ())
    text = completion.text
    if body.echo:
        text = (service.texts.decode(prompt.ids) if prompt.text is None else prompt.text) + text
        ids, logprobs = output.prompt_token_ids + ids, (output.prompt_logprobs or []) + logprobs
    columns = None if body.logprobs is None else completion_logprobs(service.texts, ids, logprobs)
    return CompletionChoice(number, text, columns, reason(completion.finish_reason))


async def _events(service: Service, body: CompletionRequest, caller: Caller, head: Head) -> AsyncGenerator[bytes, None]:
    def chunk(*choices: CompletionChoice) -> Completion:
        return Completion(head.id, head.created, head.model, head.system_fingerprint, list(choices))

    given, n = _given(service, body), body.n or 1
    with service.counted(caller, len(given) * n) as meter:
        params = _params(service, body)
        await service.check_grammar(params.grammar, "response_format")
        ids = [prompt.ids for prompt in await _prompts(service, given, meter)]
        async with service.running(ids, params, caller, body.cache_salt, meter) as running:
            lengths: dict[int, int] = {}
            async for number, part in _merged(running, meter):
                choice = CompletionChoice(number * n + part.index, part.text, None, reason(part.finish_reason))
                if part.logprob is not None:
                    start = lengths.get(choice.index, 0)
                    choice.logprobs = completion_logprobs(service.texts, [part.logprob.token_id], [part.logprob], start)
                    lengths[choice.index] = start + len(choice.logprobs.tokens[0])
                if choice.text or choice.logprobs is not None or choice.finish_reason is not None:
                    yield event(encode(chunk(choice)))
    if body.wants_usage:
        last = chunk()
        last.usage = usage(meter)
        yield event(encode(last))
    yield DONE


async def _merged(running: Sequence[RequestStream], meter: Meter) -> AsyncIterator[tuple[int, StreamedToken]]:
    """The tokens of several prompts as they come, each with its prompt's number."""
    if len(running) == 1:  # nothing to merge: a task and a queue would cost each token more than its text does
        async for token in tokens(running[0], meter):
            yield 0, token
        return
    arrived: asyncio.Queue[tuple[int, StreamedToken] | None] = asyncio.Queue()

    async def forward(number: int, stream: RequestStream) -> None:
        try:
            async for token in tokens(stream, meter):
                arrived.put_nowait((number, token))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(running)]
    try:
        for _ in tasks:
            while (one := await arrived.get()) is not None:
                yield one
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
