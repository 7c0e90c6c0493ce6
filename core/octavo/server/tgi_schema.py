"""TGI's bodies, and what its parameters are to octavo."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from octavo import SamplingParams
from octavo.server.errors import invalid
from octavo.server.grammar_schema import TgiGrammar
from octavo.server.schema import Body, NonEmpty, Nothing, Salt, Seed, unsupported
from octavo.settings import Settings

Share = Annotated[float | None, Field(gt=0, lt=1)]


class GenerateParameters(Body):
    """How the answer is generated: TGI's parameters, with its rules."""

    best_of: int | None = Field(default=None, ge=1, description="Answers to generate; the likeliest is returned.")
    temperature: float | None = Field(default=None, gt=0, le=100, description="Above 1 flattens the distribution.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="1: no penalty.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="0: no penalty.")
    top_k: int | None = Field(default=None, gt=0, le=2**31 - 1)
    top_p: Share = None
    typical_p: Share = None
    do_sample: bool | None = Field(
        default=None,
        description="false: the likeliest token each time, unless temperature, top_k, top_p or typical_p is given.",
    )
    max_new_tokens: int | None = Field(default=None, gt=0, le=2**31 - 1, description="Unset: up to the server's limit.")
    return_full_text: bool | None = Field(default=None, description="Put the prompt in front of the answer.")
    stop: list[NonEmpty] | None = Field(default=None, description="Texts that end the answer; the text stays in it.")
    truncate: int | None = Field(default=None, gt=0, description="Keep this many tokens of the prompt, the last ones.")
    watermark: Annotated[Literal[False] | None, unsupported(False)] = None
    details: bool | None = Field(default=None, description="Return the tokens too.")
    decoder_input_details: bool | None = Field(
        default=None, description="Return the prompt's tokens too; not in streams."
    )
    seed: Seed = None
    top_n_tokens: int | None = Field(default=None, ge=0, description="Likeliest tokens to return at each place.")
    grammar: TgiGrammar | None = Field(default=None, description="What the answer must look like.")
    adapter_id: Nothing = None

    @property
    def wants_details(self) -> bool:
        """Are tokens returned?"""
        return bool(self.details or self.decoder_input_details)

    @property
    def samples(self) -> bool:
        """Are tokens drawn? One rule for all: TGI has one when it checks and another when it draws."""
        given = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(value is not None for value in given)


class GenerateRequest(Body):
    """A prompt to continue."""

    inputs: str = Field(min_length=1)
    parameters: GenerateParameters | None = None
    cache_salt: Salt = None

    @property
    def asked(self) -> GenerateParameters:
        """The parameters; without any, tokens are drawn."""
        return self.parameters or GenerateParameters(do_sample=True)


class CompatibleRequest(GenerateRequest):
    """A prompt to continue, in one piece or as a stream."""

    stream: bool = False


class Token(msgspec.Struct):
    """A generated token; `special` ones are no text."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(msgspec.Struct):
    """A token of the prompt; nothing precedes the first, so that it has no log-probability."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, omit_defaults=True):
    """An answer that was generated, and is less likely than the one returned."""

    generated_text: str
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct, omit_defaults=True):
    """How an answer came about."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """An answer."""

    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class StreamDetails(msgspec.Struct):
    """How a stream ended."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(msgspec.Struct, omit_defaults=True):
    """One token of a stream; the last has the whole text."""

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET


def sampling(asked: GenerateParameters, settings: Settings, *, stream: bool) -> SamplingParams:
    """TGI's parameters as octavo's. Raises the 422 that TGI would, naming the field."""
    _check(asked, settings, stream)
    drawn = asked.samples
    return SamplingParams(
        max_tokens=asked.max_new_tokens,
        temperature=(asked.temperature or 1.0) if drawn else 0.0,
        top_k=asked.top_k or 0,
        top_p=asked.top_p or 1.0,
        typical_p=asked.typical_p or 1.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=(secrets.randbits(63) if asked.seed is None else asked.seed) if drawn else None,
        stop=asked.stop or (),
        include_stop_text=True,
        logprobs=(asked.top_n_tokens or 0) if stream or asked.wants_details or (asked.best_of or 1) > 1 else None,
        prompt_logprobs=0 if asked.decoder_input_details else None,
        grammar=None if asked.grammar is None else asked.grammar.grammar(),
        n=asked.best_of or 1,  # all of them are returned, the likeliest first
    )


def _check(asked: GenerateParameters, settings: Settings, stream: bool) -> None:
    best_of = asked.best_of or 1
    if best_of > settings.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {settings.max_best_of}. Given: {best_of}", "best_of")
    if best_of > 1 and not asked.samples:
        raise invalid("you must use sampling when `best_of` is > 1", "best_of")
    if best_of > 1 and asked.seed is not None:
        raise invalid("`seed` must not be set when `best_of` > 1", "seed")
    if best_of > 1 and stream:
        raise invalid("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if asked.decoder_input_details and stream:
        raise invalid("`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details")
    if (count := len(asked.stop or ())) > (most := settings.max_stop_sequences):
        raise invalid(f"`stop` supports up to {most} stop sequences. Given: {count}", "stop")
    if (top := asked.top_n_tokens or 0) > (most := settings.max_top_n_tokens):
        raise invalid(f"`top_n_tokens` must be >= 0 and <= {most}. Given: {top}", "top_n_tokens")
