"""What a request may say about how its tokens are chosen, checked once, when it is said."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple

import msgspec

from octavo.grammar import Grammar


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """How the tokens of one request are chosen, and when it ends.

    A value of a wrong type or out of range raises ValueError: the field, the value, what is allowed, the way out.

    max_tokens: most tokens to generate; None: until the model's or the server's limit.
    min_tokens: end-of-sequence and stop ids are banned, and stop strings ignored, before this many tokens.
    temperature: divides the logits; 0 is greedy.
    top_k, top_p, min_p, typical_p: keep the k likeliest tokens; the likeliest that hold this mass (arXiv 1904.09751);
        those at least this fraction as likely as the likeliest (arXiv 2407.01082); the most typical that hold this
        mass (arXiv 2202.00666). They apply in this order.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
        (arXiv 1909.05858).
    frequency_penalty, presence_penalty: subtracted from a token's logit once per occurrence, and once if it occurred,
        in the output alone (OpenAI's formula).
    logit_bias: added to the logits, by token id.
    seed: makes the tokens a function of the request alone, whatever else runs beside it.
    stop: a string or several; kept as a tuple. The text ends before the first to be complete, or after it with
        include_stop_text.
    stop_token_ids: ids that end the sequence, besides the model's own, which ignore_eos switches off.
    logprobs, prompt_logprobs: k returns log-probabilities of the chosen (the prompt's) and the k likeliest tokens.
    grammar: what the text must look like (see `octavo.grammar`): it ends where it must, and the sequence with it; not
        together with min_tokens or ignore_eos. The plugin of the extra `grammar` enforces it.
    n, best_of: completions returned; best_of are generated and the n of highest mean token log-probability returned.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        for field, check in _CHECKS.items():
            value = getattr(self, field)
            checked = check(field, value)
            if checked is not value:
                msgspec.structs.force_setattr(self, field, checked)
        self._check_pairs()

    @property
    def sequences(self) -> int:
        """How many sequences are generated: best_of, or n."""
        return self.best_of or self.n

    @cached_property
    def argmax_only(self) -> bool:
        """Whether the next token is the argmax of the raw logits, and no log-probability is wanted (bans aside)."""
        return (
            self.temperature == 0
            and self.logprobs is None
            and self.sequences == self.n
            and not self.logit_bias
            and not self.penalises
        )

    @cached_property
    def penalises(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
                f"lower min_tokens or raise max_tokens"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(
                f"best_of={self.best_of} is less than n={self.n}, the completions returned of those generated: "
                f"raise best_of, lower n or leave best_of out"
            )
        for field, plain in (("min_tokens", 0), ("ignore_eos", False)):
            if self.grammar is not None and (value := getattr(self, field)) != plain:
                raise ValueError(
                    f"{field}={value} does not go with grammar, which says itself where the text ends: "
                    f"leave one of them out"
                )


class _Range(NamedTuple):
    """The values one field takes: finite, so that NaN and infinity are outside too."""

    low: float
    high: float
    hint: str
    above_low: bool = False
    optional: bool = False

    def number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not self._holds(value):
            raise _refusal(field, value, f"a number {self}", self.hint)
        return float(value)

    def whole(self, field: str, value: Any) -> int | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral) or not self._holds(value):
            raise _refusal(field, value, f"a whole number {self}", self.hint)
        return int(value)

    def _holds(self, value: Any) -> bool:
        return bool(self.low < value if self.above_low else self.low <= value) and bool(value <= self.high)

    def __str__(self) -> str:
        return f"above {self.low} and up to {self.high}" if self.above_low else f"from {self.low} to {self.high}"


def _refusal(field: str, value: object, allowed: str, way_out: str) -> ValueError:
    return ValueError(f"{field}={reprlib.repr(value)} is not allowed: give {allowed}; {way_out}")


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(field, value, "True or False", "a word or a number is not taken for one")
    return value


def _grammar(field: str, value: Any) -> Grammar | None:
    if not isinstance(value, Grammar | None):
        raise _refusal(field, value, "one of octavo.grammar's kinds", "None leaves the text free")
    return value


def _logit_bias(field: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal(field, value, "a mapping from token id to bias", "{} biases nothing")
    return {_token_id(field, token): _BIAS.number(f"{field}[{token}]", bias) for token, bias in value.items()}


def _stop_strings(field: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(stop, str) and stop for stop in strings):
        raise _refusal(field, value, "a string or a list of strings, none of them empty", "[] stops at none")
    return tuple(strings)


def _stop_token_ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _refusal(field, value, "a list of token ids", "[] stops at none")
    return tuple(_token_id(field, token) for token in value)


def _token_id(field: str, value: Any) -> int:
    token = _TOKEN_ID.whole(f"the token id in {field}", value)
    assert token is not None  # only an optional range returns None
    return token


_LARGEST = 2**31 - 1
_MOST = 1024  # of what costs memory for each: sequences, and log-probabilities of a token
_TOKEN_ID = _Range(0, _LARGEST, "take it from the tokenizer")
_BIAS = _Range(-100, 100, "-100 all but bans a token, 100 all but forces it")
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _Range(1, _LARGEST, "None generates up to the model's limit", optional=True).whole,
    "min_tokens": _Range(0, _LARGEST, "0 asks for no minimum").whole,
    "temperature": _Range(0, 100, "0 is greedy, 1 leaves the model's distribution as it is").number,
    "top_k": _Range(0, _LARGEST, "0 switches it off").whole,
    "top_p": _Range(0, 1, "1 switches it off", above_low=True).number,
    "min_p": _Range(0, 1, "0 switches it off").number,
    "typical_p": _Range(0, 1, "1 switches it off", above_low=True).number,
    "repetition_penalty": _Range(0.01, 100, "1 switches it off, more than 1 discourages repetition").number,
    "frequency_penalty": _Range(-2, 2, "0 switches it off").number,
    "presence_penalty": _Range(-2, 2, "0 switches it off").number,
    "logit_bias": _logit_bias,
    "seed": _Range(-(2**63), 2**64 - 1, "None takes a fresh seed", optional=True).whole,
    "stop": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "include_stop_text": _flag,
    "skip_special_tokens": _flag,
    "logprobs": _Range(0, _MOST, "None returns none, 0 the chosen token's alone", optional=True).whole,
    "prompt_logprobs": _Range(0, _MOST, "None returns none, 0 the prompt tokens' alone", optional=True).whole,
    "grammar": _grammar,
    "n": _Range(1, _MOST, "1 returns one completion").whole,
    "best_of": _Range(1, _MOST, "None generates the n that are returned and no more", optional=True).whole,
}
