"""Rows and logits to sample from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.engine.sampling_batch import SamplingRow
from octavo.engine.sampling_params import SamplingParams


def row(
    params: SamplingParams, seed: int = 0, position: int = 0, prompt: Sequence[int] = (), **rest: Any
) -> SamplingRow:
    return SamplingRow(params, seed, position, np.array(prompt, dtype=np.int32), **{"output_ids": (), **rest})


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
