"""TGI's routes that generate: /generate, /generate_stream and /."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo import SamplingParams
from octavo.outputs import Completion, RequestOutput, StreamedToken, TokenLogprob
from octavo.server import errors
from octavo.server.meter import Meter
from octavo.server.schema import responses
from octavo.server.service import Caller, Service, result, tokens
from octavo.server.sse import EventStream, answer, event
from octavo.server.tgi_schema import (
    BestOfSequence,
    CompatibleRequest,
    Details,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
    sampling,
)

encode = msgspec.json.Encoder().encode

Reason = Literal["length", "eos_token", "stop_sequence"]
REASONS: dict[str, Reason] = {"length": "length", "eos": "eos_token", "stop": "stop_sequence"}


def routes(service: Service) -> APIRouter:
    """The routes, bound to a running server."""
    router = APIRouter(tags=["Text generation inference"], default_response_class=Response)

    @router.post("/generate", responses=responses(GenerateResponse))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a prompt, and answer when it is done."""
        return await whole(service, body, request)

    @router.post("/generate_stream", responses=responses(stream=StreamResponse))
    async def generate_stream(body: GenerateRequest, request: Request) -> Response:
        """Continue a prompt, each token an event."""
        return stream(service, body, request)

    @router.post("/", responses=responses(GenerateResponse, several=True, stream=StreamResponse))
    async def compatible(body: CompatibleRequest, request: Request) -> Response:
        """Continue a prompt; the whole text with the prompt in front unless return_full_text says no."""
        if body.stream:
            return stream(service, body, request)
        return await whole(service, body, request, listed=True)

    return router


async def whole(service: Service, body: GenerateRequest, request: Request, *, listed: bool = False) -> Response:
    """The answer in one piece; in a list of one for the route that has always had it so."""
    caller = service.caller(request)
    meter, found = await answer(request, _generate(service, body, caller, listed), caller.deadline)
    content = encode([found] if listed else found)
    return Response(content, media_type="application/json", headers=meter.headers(service.engine.info.device))


def stream(service: Service, body: GenerateRequest, request: Request) -> Response:
    """The answer as events."""
    caller = service.caller(request)
    headers = {"x-compute-type": service.engine.info.device, "x-compute-characters": str(len(body.inputs))}
    path = request.url.path
    return EventStream(
        _events(service, body, caller), lambda error: event(errors.body(path, error)), caller.deadline, headers,
        service.settings.max_queue_seconds,
    )  # fmt: skip


async def _prompt(service: Service, body: GenerateRequest) -> list[int]:
    ids = await service.texts.encode(body.inputs)
    keep, most = body.asked.truncate, service.engine.info.max_input_tokens
    if keep is None:
        return ids
    if keep > most:
        raise errors.invalid(
            f"`truncate` must be strictly positive and at most {most}. Given: {keep}", "parameters.truncate"
        )
    return ids[-keep:]


async def _generate(
    service: Service, body: GenerateRequest, caller: Caller, listed: bool
) -> tuple[Meter, GenerateResponse]:
    asked = body.asked
    with service.counted(caller, asked.best_of or 1) as meter:
        params = sampling(asked, service.settings, stream=False)
        await service.check_grammar(params.grammar, "parameters.grammar")
        meter.characters = len(body.inputs)
        prompt = await _prompt(service, body)
        async with service.running([prompt], params, caller, body.cache_salt, meter) as (running,):
            if not asked.wants_details:
                output, parts = await result(running, meter), []
            else:
                parts = [token async for token in tokens(running, meter)]
                output = await running.result()
        meter.end()
    full = listed if asked.return_full_text is None else asked.return_full_text
    return meter, _response(service, output, parts, params, body.inputs if full else "", asked.wants_details)


def _response(
    service: Service, output: RequestOutput, parts: Sequence[StreamedToken], params: SamplingParams, prefix: str,
    wants_details: bool,
) -> GenerateResponse:  # fmt: skip
    ranked = sorted(output.completions, key=lambda completion: -completion.mean_logprob)
    text = prefix + ranked[0].text
    if not wants_details:
        return GenerateResponse(text)
    prefill = _prefill(service, output)
    best, *others = (_sequence(service, one, parts, params, prefix, prefill) for one in ranked)
    details = Details(
        best.finish_reason, best.generated_tokens, best.seed, prefill, best.tokens, others or msgspec.UNSET,
        best.top_tokens,
    )  # fmt: skip
    return GenerateResponse(text, details)


def _sequence(
    service: Service, completion: Completion, parts: Sequence[StreamedToken], params: SamplingParams, prefix: str,
    prefill: list[PrefillToken],
) -> BestOfSequence:  # fmt: skip
    own = [part for part in parts if part.index == completion.index and part.token_id is not None]
    return BestOfSequence(
        prefix + completion.text,
        REASONS[completion.finish_reason or "length"],
        len(own),
        params.seed,
        prefill,
        [_token(service, part) for part in own],
        [_top(service, part.logprob) for part in own] if params.logprobs else msgspec.UNSET,
    )


def _prefill(service: Service, output: RequestOutput) -> list[PrefillToken]:
    known = output.prompt_logprobs or []
    text = service.texts.token_text
    return [
        PrefillToken(token, text(token), None if one is None else one.logprob)
        for token, one in zip(output.prompt_token_ids, known, strict=False)
    ]


def _token(service: Service, part: StreamedToken) -> Token:
    """A token with the text that it made showable; special ones bear their names.

    The one that ends an answer brings what was held back until then (the beginning of a stop text, bytes that make no
    character). It is told as text then: clients put an answer together from the tokens that are not special.
    """
    token_id = part.token_id or 0
    special = service.texts.is_special(token_id) and not part.text
    text = service.texts.token_text(token_id) if special else part.text
    return Token(token_id, text, None if part.logprob is None else part.logprob.logprob, special)


def _top(service: Service, logprob: TokenLogprob | None) -> list[Token]:
    texts = service.texts
    likeliest = () if logprob is None else logprob.top
    return [Token(id, texts.token_text(id), value, texts.is_special(id)) for id, value in likeliest]


async def _events(service: Service, body: GenerateRequest, caller: Caller) -> AsyncGenerator[bytes, None]:
    asked = body.asked
    with service.counted(caller, 1) as meter:
        params = sampling(asked, service.settings, stream=True)
        await service.check_grammar(params.grammar, "parameters.grammar")
        prompt = await _prompt(service, body)
        async with service.running([prompt], params, caller, body.cache_salt, meter) as (running,):
            index = 0
            async for part in tokens(running, meter):
                index += 1
                told = StreamResponse(index, _token(service, part), None, None)
                if params.logprobs:
                    told.top_tokens = _top(service, part.logprob)
                if part.finish_reason is not None:
                    prefix = body.inputs if asked.return_full_text else ""
                    told.generated_text = prefix + running.output.completions[0].text
                    if asked.details:
                        told.details = StreamDetails(
                            REASONS[part.finish_reason], meter.generated_tokens, params.seed, len(prompt)
                        )
                yield event(encode(told))
