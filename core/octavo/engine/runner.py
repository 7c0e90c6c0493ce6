"""The model on the device: one step's arrays in, sampled tokens out. It never sees a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch
from octavo.engine.graphs import DecodeGraphs
from octavo.engine.sampler import Sampled, Sampler, TokenLogprobs, prompt_logprobs
from octavo.engine.step import Step
from octavo.models.bridge import AttentionGroup
from octavo.models.capture import Forward


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the sampling rows in their order, and of each of the step's `prompts`."""

    sampled: Sampled
    prompts: Sequence[TokenLogprobs]


class Runner:
    """A model whose attention layers are bound to groups, on one device."""

    def __init__(self, forward: Forward, groups: Sequence[AttentionGroup], device: torch.device) -> None:
        self.forward = forward
        self.groups = groups
        self.device = device
        self.graphs: DecodeGraphs | None = None
        """For steps that were captured, if any were."""
        self.sampler = Sampler()

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Copy blocks, compute, sample. Raises what the model, the backend or the device raises."""
        self._copy(step.copies)
        logits = self.graphs.logits(step) if self.graphs is not None and self.graphs.takes(step) else self._logits(step)
        sampling = len(step.sampling)
        sampled = self.sampler(logits[:sampling], step.sampling, step.processors)
        prompts = []
        start = sampling
        for prompt in step.prompts:
            prompts.append(prompt_logprobs(logits[start : start + prompt.tokens], prompt.next_ids, prompt.top))
            start += prompt.tokens
        return StepResult(sampled, prompts)

    def _logits(self, step: Step) -> Tensor:
        """[len(step.logits_of), vocab] of the packed tokens, which are one sequence to the model."""
        batch = self._batch(step)
        for group in self.groups:
            group.begin(batch)
        ids, positions = self._tensor(step.token_ids)[None], self._tensor(step.positions)[None]
        return self.forward(ids, positions, self._tensor(step.logits_of))[0]

    def _batch(self, step: Step) -> AttentionBatch:
        return AttentionBatch(
            query_starts=self._tensor(step.query_starts),
            context_lengths=self._tensor(step.context_lengths),
            block_table=self._tensor(step.block_table),
            slots=self._tensor(step.slots),
            max_query=int(np.diff(step.query_starts).max()),
            max_context=int(step.context_lengths.max()),
            decodes=step.decodes,
        )

    def _copy(self, copies: NDArray[np.int64]) -> None:
        if copies.size:
            sources, targets = self._tensor(copies[:, 0].copy()), self._tensor(copies[:, 1].copy())
            for group in self.groups:
                group.backend.layout.copy_blocks(group.cache, sources, targets)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
