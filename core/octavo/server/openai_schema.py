"""The bodies of requests to OpenAI's routes, and what their fields are to octavo."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, WithJsonSchema, model_validator

from octavo import SamplingParams
from octavo.server.errors import invalid
from octavo.server.grammar_schema import ResponseFormat
from octavo.server.schema import Body, NonEmpty, Nothing, Salt, Text
from octavo.server.tools_schema import NamedChoice, Tool, ToolCall
from octavo.settings import Settings

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(min_length=1)]
Tokens = Annotated[int | None, Field(gt=0, le=2**31 - 1)]


MOST_BIASES = 1024
"""Of a request: each costs every step of it."""
_BIASES = {
    "type": "object",
    "maxProperties": MOST_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


class StreamOptions(Body):
    """What a stream says besides the answer."""

    include_usage: bool = False


class CommonRequest(Body):
    """What chats and completions share; some fields are octavo's own."""

    model: Text | None = Field(default=None, description="Any name is taken: this server has one model.")
    max_tokens: Tokens = Field(default=None, description="Unset: up to the server's limit.")
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="0: the likeliest token each time. Default 1."
    )
    top_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, description="Answers to each prompt.")
    stop: NonEmpty | list[NonEmpty] | None = Field(
        default=None, description="Texts that end the answer and are left out of it."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="The same seed, the same tokens.")
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES), WithJsonSchema(_BIASES)] | None = Field(
        default=None, description="By token id."
    )
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1, description="octavo's own; 0 and -1: off.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="octavo's own.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="octavo's own.")
    ignore_eos: bool | None = Field(
        default=None, description="octavo's own: go on to max_tokens, past any end of sequence."
    )
    cache_salt: Salt = None
    response_format: ResponseFormat | None = Field(default=None, description="What the answer must look like.")

    @property
    def wants_usage(self) -> bool:
        """Does the stream end with the usage?"""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        """The stop texts, however many were given."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_tokens


class CompletionRequest(CommonRequest):
    """Prompts to continue."""

    prompt: NonEmpty | Several[NonEmpty] | Several[TokenId] | Several[Several[TokenId]]
    best_of: int | None = Field(
        default=None, ge=1, description="Answers to generate, of which the n likeliest are returned."
    )
    logprobs: int | None = Field(default=None, ge=0, description="Likeliest tokens to return at each place.")
    echo: bool | None = Field(default=None, description="Put the prompt in front of the answer; not in streams.")
    suffix: Nothing = None

    @property
    def length_fields(self) -> tuple[str, str]:
        """What the prompt and the answer's length are called."""
        return "prompt", "max_tokens"


class TextPart(Body):
    """A part of a turn that is text."""

    type: Literal["text"]
    text: Text


def _content_is_required(schema: dict[str, Any]) -> None:
    """Only turns with tool calls have none, and those are for templates alone."""
    schema["required"].append("content")
    content = schema["properties"]["content"]
    content["anyOf"] = [kind for kind in content["anyOf"] if kind != {"type": "null"}]
    del content["default"]


class Message(Body):
    """A turn of a chat. Other fields are there for templates that use them."""

    model_config = Body.model_config | {"extra": "allow", "json_schema_extra": _content_is_required}

    role: str = Field(min_length=1)
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, description="Of the assistant's turns.")
    tool_call_id: Text | None = Field(default=None, description="Of a tool's turn: the call that it answers.")

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("it needs content: a text, or a list of parts of the type text")
        return self

    def for_template(self) -> dict[str, Any]:
        """The turn as templates read it: the content as one text."""
        turn = self.model_dump(exclude_none=True)
        if not isinstance(self.content, str):
            turn["content"] = "".join(part.text for part in self.content or ())
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return turn


class ChatRequest(CommonRequest):
    """A chat to go on with."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Tokens = Field(default=None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, description="Likeliest tokens to return at each place.")
    tools: list[Tool] | None = Field(default=None, max_length=128, description="Functions that may be called.")
    tool_choice: NonEmpty | NamedChoice | None = Field(
        default=None, description="none; auto: text or calls; required: calls; a function, or its name: one call of it."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call at most.")
    tool_prompt: Text | None = Field(
        default=None, description="TGI's: said in front of the tools, where the template knows nothing of tools."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="octavo's own: variables of the template."
    )

    def most_tokens(self) -> int | None:
        """Of the answer."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def length_fields(self) -> tuple[str, str]:
        """What the chat and the answer's length are called: by the name that was given."""
        newer = self.max_tokens is None and self.max_completion_tokens is not None
        return "messages", "max_completion_tokens" if newer else "max_tokens"


def sampling(asked: CommonRequest, settings: Settings, top: int | None, best_of: int | None = None) -> SamplingParams:
    """OpenAI's fields as octavo's; `top` likeliest tokens are wanted. Raises a 422 that names the field."""
    n = asked.n or 1
    for name, count in ("n", n), ("best_of", best_of or 1):
        if count > settings.max_best_of:
            raise invalid(f"`{name}` must be > 0 and <= {settings.max_best_of}. Given: {count}", name)
    if best_of is not None and best_of < n:
        raise invalid(f"`best_of` must be at least `n`, which is {n}. Given: {best_of}", "best_of")
    if best_of is not None and best_of > n and asked.stream:
        raise invalid("`best_of` > `n` is not supported when streaming tokens", "best_of")
    if len(asked.stops) > (most := settings.max_stop_sequences):
        raise invalid(f"`stop` supports up to {most} stop sequences. Given: {len(asked.stops)}", "stop")
    name = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
    if (top or 0) > (most := settings.max_top_n_tokens):
        raise invalid(f"`{name}` must be >= 0 and <= {most} (max_top_n_tokens). Given: {top}", name)
    return SamplingParams(
        max_tokens=asked.most_tokens(),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=max(0, asked.top_k or 0),
        top_p=1.0 if asked.top_p is None else max(asked.top_p, 1e-9),  # 0 keeps the likeliest token alone
        min_p=asked.min_p or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        logit_bias=_bias(asked.logit_bias or {}),
        seed=asked.seed,
        stop=asked.stops,
        ignore_eos=bool(asked.ignore_eos),
        logprobs=top,
        grammar=None if asked.response_format is None else asked.response_format.grammar(),
        n=n,
        best_of=best_of,
    )


def _bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not token.isdecimal() or len(token) > 10 or int(token) >= 2**31:
            raise invalid(f"`logit_bias` takes token ids for keys. Given: {token[:40]!r}", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}
