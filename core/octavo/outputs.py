"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's natural log-probability under the model's raw distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place with theirs, best first, as many as were asked for."""


@dataclass(slots=True)
class Completion:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All generated tokens, the one that ended it among them."""
    finish_reason: str | None = None
    """"eos", "length", "stop" (a stop text), "cancelled" or "error"; None while it runs."""
    logprobs: list[TokenLogprob] | None = None
    """One for each token, when asked for."""
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by; minus infinity without tokens."""
        if not self.logprobs:
            return float("-inf")
        return sum(token.logprob for token in self.logprobs) / len(self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers."""

    prompt: str | None
    """None when it was given as tokens."""
    prompt_token_ids: list[int]
    completions: list[Completion]
    cached_tokens: int = 0
    """Prompt tokens that were not computed but found in the cache."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token, the first None: nothing precedes it. When asked for."""


class StreamedToken(msgspec.Struct, frozen=True):
    """A token as it comes."""

    index: int
    """Of the completion it belongs to."""
    token_id: int | None
    """None for the end of a completion that brings no token."""
    text: str
    """What can be shown now that was not before; may be empty, or hold the text of several tokens."""
    logprob: TokenLogprob | None
    finish_reason: str | None
    cached_tokens: int
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""
