"""What the engine says of a request after a step."""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.engine.request import FinishReason, Request
from octavo.engine.sampled import Sampled, TokenLogprobs
from octavo.engine.sampling_params import SamplingParams


class Output(msgspec.Struct):
    """What one step brought one request."""

    request_id: int
    token_id: int | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    """The likeliest tokens with their log-probabilities, when asked for."""
    prompt: TokenLogprobs | None = None
    """Log-probabilities of the next prompt positions, when asked for."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens that were taken from the cache."""
    queue_seconds: float = 0.0
    """From submission to the first step."""

    @classmethod
    def of(cls, request: Request, prompt: TokenLogprobs | None = None) -> Output:
        """With nothing in it but what is known of the request."""
        return cls(
            request.id, cached_tokens=request.cached_tokens or 0, queue_seconds=request.queue_seconds, prompt=prompt
        )

    def add_logprobs(self, params: SamplingParams, sampled: Sampled, row: int) -> None:
        """Those of sampling row `row`, as far as the request asks for them."""
        if sampled.logprobs is not None and not np.isnan(sampled.logprobs[row]):
            self.logprob = float(sampled.logprobs[row])
        if params.logprobs and sampled.top_token_ids is not None and sampled.top_logprobs is not None:
            ids, logprobs = sampled.top_token_ids[row], sampled.top_logprobs[row]
            self.top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
