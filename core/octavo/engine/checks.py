"""What the engine refuses at once: token ids that the model does not know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import RequestRefused


def checked_prompt(prompt: Sequence[int] | NDArray[np.int64], vocab_size: int) -> NDArray[np.int32]:
    """The prompt as int32 [tokens]. Raises RequestRefused for none, and for ids that are not in the vocabulary."""
    try:
        tokens = np.asarray(prompt, dtype=np.int64).reshape(-1)
    except OverflowError:
        raise RequestRefused(f"a token id of the prompt is far out of the vocabulary of {vocab_size}") from None
    if not tokens.size:
        raise RequestRefused("the prompt has no tokens: give at least one")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise RequestRefused(f"token id {outside[0]} of the prompt is not in the vocabulary: 0 to {vocab_size - 1}")
    return tokens.astype(np.int32)


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestRefused for parameters that name a token beyond the vocabulary."""
    for name in ("logit_bias", "stop_token_ids"):
        outside = [token for token in getattr(params, name) if token >= vocab_size]
        if outside:
            raise RequestRefused(
                f"{name} has token id {outside[0]}, which is not in the vocabulary: 0 to {vocab_size - 1}"
            )
