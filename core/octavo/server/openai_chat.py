"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request, Response

from octavo import SamplingParams
from octavo.grammar import ToolCalls
from octavo.outputs import Completion
from octavo.server.chat_answers import Deltas, finish_reason, message
from octavo.server.meter import Meter
from octavo.server.openai import Head, chat_logprobs, encode, respond, usage
from octavo.server.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
)
from octavo.server.openai_schema import ChatRequest, sampling
from octavo.server.schema import responses
from octavo.server.service import Caller, Service, result, tokens
from octavo.server.sse import DONE, event
from octavo.server.tool_choice import grammar, offered


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
    turns = [message.for_template() for message in body.messages]
    tools = [tool.model_dump(exclude_unset=True) for tool in offered(body)]
    return await service.texts.chat(turns, tools, body.tool_prompt, body.chat_template_kwargs or {})


async def _params(service: Service, body: ChatRequest) -> SamplingParams:
    wanted, field = grammar(body)
    await service.check_grammar(wanted, field)
    return msgspec.structs.replace(sampling(body, service.settings, _top(body)), grammar=wanted)


async def _complete(service: Service, body: ChatRequest, caller: Caller, head: Head) -> tuple[Meter, ChatCompletion]:
    with service.counted(caller, body.n or 1) as meter:
        params = await _params(service, body)
        ids = await _tokens(service, body, meter)
        async with service.running([ids], params, caller, body.cache_salt, meter) as (running,):
            output = await result(running, meter)
        meter.end()
    with_tools = isinstance(params.grammar, ToolCalls)
    choices = [_choice(service, index, one, with_tools) for index, one in enumerate(output.completions)]
    return meter, ChatCompletion(head.id, head.created, head.model, head.system_fingerprint, choices, usage(meter))


def _top(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


async def _tokens(service: Service, body: ChatRequest, meter: Meter) -> list[int]:
    text = await prompt(service, body)
    meter.characters = len(text)
    return await service.texts.encode(text, special_tokens=False)  # the template has written them


def _choice(service: Service, index: int, completion: Completion, with_tools: bool) -> ChatChoice:
    logprobs = None if completion.logprobs is None else chat_logprobs(service.texts, completion.logprobs)
    told, called = message(completion.text, with_tools)
    return ChatChoice(index, told, logprobs, finish_reason(completion.finish_reason, called) or "stop")


async def _events(service: Service, body: ChatRequest, caller: Caller, head: Head) -> AsyncGenerator[bytes, None]:
    def chunk(*choices: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(head.id, head.created, head.model, head.system_fingerprint, list(choices))

    with service.counted(caller, body.n or 1) as meter:
        params = await _params(service, body)
        ids = await _tokens(service, body, meter)
        async with service.running([ids], params, caller, body.cache_salt, meter) as (running,):
            with_tools = isinstance(params.grammar, ToolCalls)
            answers = [Deltas(with_tools) for _ in range(params.n)]
            async for part in tokens(running, meter):
                deltas, ended = answers[part.index].next(part)
                choices = [ChunkChoice(part.index, delta, None, None) for delta in deltas]
                if choices:
                    choices[-1].finish_reason = ended
                    if part.logprob is not None:
                        choices[-1].logprobs = chat_logprobs(service.texts, [part.logprob])
                for choice in choices:
                    yield event(encode(chunk(choice)))
    if body.wants_usage:
        last = chunk()
        last.usage = usage(meter)
        yield event(encode(last))
    yield DONE
