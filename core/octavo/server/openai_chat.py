"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.outputs import Completion
from octavo.server.meter import Meter
from octavo.server.openai import Head, chat_logprobs, encode, reason, respond, usage
from octavo.server.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
    ChunkChoice,
    Delta,
)
from octavo.server.openai_schema import ChatRequest, sampling
from octavo.server.schema import responses
from octavo.server.service import Caller, Service, result, tokens
from octavo.server.sse import DONE, event


def routes(service: Service) -> APIRouter:
    """The route, bound to a running server."""
    router = APIRouter(tags=["OpenAI"], default_response_class=Response)

    @router.post("/v1/chat/completions", responses=responses(ChatCompletion, stream=ChatCompletionChunk, openai=True))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Go on with a chat."""
        return await respond(service, request, body, "chatcmpl", _events, _complete)

    return router


async def prompt(service: Service, body: ChatRequest) -> str:
    """The chat in the model's template."""
    messages = [message.for_template() for message in body.messages]
    return await service.texts.chat(messages, body.chat_template_kwargs or {})


async def _complete(service: Service, body: ChatRequest, caller: Caller, head: Head) -> tuple[Meter, ChatCompletion]:
    with service.counted(caller, body.n or 1) as meter:
        params = sampling(body, service.settings, _top(body))
        ids = await _tokens(service, body, meter)
        async with service.running([ids], params, caller, body.cache_salt, meter) as (running,):
            output = await result(running, meter)
        meter.end()
    choices = [_choice(service, index, completion) for index, completion in enumerate(output.completions)]
    return meter, ChatCompletion(head.id, head.created, head.model, head.system_fingerprint, choices, usage(meter))


def _top(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


async def _tokens(service: Service, body: ChatRequest, meter: Meter) -> list[int]:
    text = await prompt(service, body)
    meter.characters = len(text)
    return await service.texts.encode(text, special_tokens=False)  # the template has written them


def _choice(service: Service, index: int, completion: Completion) -> ChatChoice:
    logprobs = None if completion.logprobs is None else chat_logprobs(service.texts, completion.logprobs)
    return ChatChoice(index, ChatMessage(completion.text), logprobs, reason(completion.finish_reason) or "stop")


async def _events(service: Service, body: ChatRequest, caller: Caller, head: Head) -> AsyncGenerator[bytes, None]:
    def chunk(*choices: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(head.id, head.created, head.model, head.system_fingerprint, list(choices))

    with service.counted(caller, body.n or 1) as meter:
        params = sampling(body, service.settings, _top(body))
        ids = await _tokens(service, body, meter)
        async with service.running([ids], params, caller, body.cache_salt, meter) as (running,):
            begun: set[int] = set()
            async for part in tokens(running, meter):
                if not part.text and part.finish_reason is None and part.logprob is None and part.index in begun:
                    continue
                delta = Delta(part.text or msgspec.UNSET)
                if part.index not in begun:
                    begun.add(part.index)
                    delta = Delta(part.text, "assistant")
                logprobs = None if part.logprob is None else chat_logprobs(service.texts, [part.logprob])
                yield event(encode(chunk(ChunkChoice(part.index, delta, logprobs, reason(part.finish_reason)))))
    if body.wants_usage:
        last = chunk()
        last.usage = usage(meter)
        yield event(encode(last))
    yield DONE
