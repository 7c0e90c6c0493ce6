"""What sampling gives, on the host: plain arrays."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.engine.sampling_batch import Integers


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities float32 [tokens], and the k likeliest tokens, best first: int64 and float32 [tokens, k]."""

    logprobs: npt.NDArray[np.float32]
    top_token_ids: Integers
    top_logprobs: npt.NDArray[np.float32]


@dataclass(slots=True)
class Sampled:
    """The next tokens, int64 [rows], and log-probabilities under the model's raw distribution if a row asked for them.

    logprobs: float32 [rows], NaN where not asked. top_token_ids, top_logprobs: a row's are as long as it asked.
    """

    token_ids: Integers
    logprobs: npt.NDArray[np.float32] | None = None
    top_token_ids: list[Integers] | None = None
    top_logprobs: list[npt.NDArray[np.float32]] | None = None
    failed: dict[int, BaseException] = field(default_factory=dict)
    """Rows whose logits processor raised: their token means nothing."""
