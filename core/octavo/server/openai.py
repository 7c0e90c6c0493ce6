"""What OpenAI's two routes share: names, usage, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec
from fastapi import Request, Response

from octavo import __version__
from octavo.outputs import TokenLogprob
from octavo.server import errors
from octavo.server.meter import Meter
from octavo.server.openai_answers import (
    ChoiceLogprobs,
    CompletionLogprobs,
    PromptTokensDetails,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from octavo.server.openai_schema import ChatRequest, CompletionRequest
from octavo.server.service import Caller, Service
from octavo.server.sse import EventStream, answer, event
from octavo.server.text import Texts

encode = msgspec.json.Encoder().encode

Reason = Literal["stop", "length"]
Body = TypeVar("Body", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Head:
    """What all the events of an answer have in common."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    system_fingerprint: str = f"octavo-{__version__}"

    @classmethod
    def of(cls, prefix: str, service: Service, caller: Caller) -> Head:
        """A new answer's."""
        return cls(f"{prefix}-{caller.request_id}", service.model)


async def respond(
    service: Service,
    request: Request,
    body: Body,
    kind: str,
    stream: Callable[[Service, Body, Caller, Head], AsyncGenerator[bytes, None]],
    complete: Callable[[Service, Body, Caller, Head], Awaitable[tuple[Meter, msgspec.Struct]]],
) -> Response:
    """The answer to a request, as events if it asks for them; `kind` begins its id."""
    caller, device = service.caller(request, body.length_fields), service.engine.info.device
    head = Head.of(kind, service, caller)
    if body.stream:
        events = stream(service, body, caller, head)
        return EventStream(
            events,
            error_event(request),
            caller.deadline,
            {"x-compute-type": device},
            service.settings.max_queue_seconds,
        )
    meter, found = await answer(request, complete(service, body, caller, head), caller.deadline)
    return Response(encode(found), media_type="application/json", headers=meter.headers(device))


def reason(finish_reason: str | None) -> Reason | None:
    """Octavo's finish reason in OpenAI's words."""
    if finish_reason is None:
        return None
    return "length" if finish_reason == "length" else "stop"


def usage(meter: Meter) -> Usage:
    """What a request has cost."""
    total = meter.prompt_tokens + meter.generated_tokens
    return Usage(meter.prompt_tokens, meter.generated_tokens, total, PromptTokensDetails(meter.cached_tokens))


def chat_logprobs(texts: Texts, logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """As chats have them: an object a token."""
    return ChoiceLogprobs(
        [
            TokenLogprobs(
                texts.token_text(one.token_id),
                one.logprob,
                _bytes(texts, one.token_id),
                [TopLogprob(texts.token_text(id), value, _bytes(texts, id)) for id, value in one.top],
            )
            for one in logprobs
        ]
    )


def completion_logprobs(texts: Texts, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], start: int = 0) -> (
    CompletionLogprobs
):  # fmt: skip
    """As completions have them: in columns; `start` is where the first token stands in the text."""
    columns = CompletionLogprobs([], [], [], [])
    for token, one in zip(ids, logprobs, strict=True):
        text = texts.token_text(token)
        columns.tokens.append(text)
        columns.token_logprobs.append(None if one is None else one.logprob)
        columns.top_logprobs.append(None if one is None else {texts.token_text(id): value for id, value in one.top})
        columns.text_offset.append(start)
        start += len(text)
    return columns


def _bytes(texts: Texts, token_id: int) -> list[int] | None:
    text = texts.token_text(token_id)
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def error_event(request: Request) -> errors.ErrorEvent:
    """What a stream says when it fails under way: OpenAI's clients raise what it has under `error`."""
    path = request.scope["path"]
    return lambda error: event(errors.body(path, error))
