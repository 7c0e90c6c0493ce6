"""Rows and logits to sample from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.engine.sampling_batch import SamplingRow
from octavo.engine.sampling_params import SamplingParams

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**9},
    {"top_p": 0.001},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.5},
    {"typical_p": 0.99},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.03, "typical_p": 0.7, "temperature": 1.7},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "top_p": 0.9},
]


def row(
    params: SamplingParams, seed: int = 0, position: int = 0, prompt: Sequence[int] = (), **rest: Any
) -> SamplingRow:
    return SamplingRow(params, seed, position, np.array(prompt, dtype=np.int32), **{"output_ids": (), **rest})


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
