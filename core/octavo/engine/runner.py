"""The model on the device: one step's arrays in, sampled tokens out. It never sees a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch, HostLengths
from octavo.engine.fixed import FixedSteps
from octavo.engine.graphs import DecodeGraphs, follow
from octavo.engine.sampled import Sampled, TokenLogprobs
from octavo.engine.sampler import Chosen, Sampler, prompt_logprobs
from octavo.engine.step import Step
from octavo.engine.transfer import Download, upload
from octavo.models.bridge import AttentionGroup
from octavo.models.capture import Forward


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of the sampling rows in their order, and of each of the step's `prompts`."""

    sampled: Sampled
    prompts: Sequence[TokenLogprobs]


class OutOfMemory(MemoryError):
    """A step that does not fit into what is free of the device's memory; nothing of it was launched that counts."""


class Flight:
    """A step that was launched: the device may still compute it."""

    def __init__(self, chosen: Chosen, prompts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._chosen = chosen
        self._coming = Download([*chosen.tensors, *(tensor for prompt in prompts for tensor in prompt)])

    def wait(self) -> StepResult:
        """What came of it. Raises what went wrong on the device."""
        arrays = self._coming.arrays()
        own = len(self._chosen.tensors)
        prompts = [TokenLogprobs(*arrays[start : start + 3]) for start in range(own, len(arrays), 3)]
        return StepResult(self._chosen.sampled(arrays[:own]), prompts)


class Runner:
    """A model whose attention layers are bound to groups, on one device."""

    def __init__(self, forward: Forward, groups: Sequence[AttentionGroup], device: torch.device) -> None:
        self.forward = forward
        self.groups = groups
        self.device = device
        self.graphs: DecodeGraphs | None = None
        """For steps that were captured, if any were."""
        self.fixed: FixedSteps | None = None
        """For all steps, where each is to have the same shape."""
        self.sampler = Sampler()
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        """Tokens of the step that was launched last."""

    def run(self, step: Step) -> StepResult:
        """Launch a step and wait for it."""
        return self.launch(step).wait()

    def launch(self, step: Step) -> Flight:
        """Copy blocks, compute, sample; waits for the device only where sampling must.

        A token id of -1 - row is the one that this row of the step before has got, which only the device knows yet.
        Raises OutOfMemory, or what else the model, the backend or the device raises.
        """
        try:
            return self._launch(step)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error

    @torch.inference_mode()
    def _launch(self, step: Step) -> Flight:
        self._copy(step.copies)
        drawn: Tensor | None = None
        if self.fixed is not None:
            logits, drawn = self.fixed.run(step, self._last)
        elif self.graphs is not None and self.graphs.takes(step, self._last):
            logits, drawn = self.graphs.run(step, self._last)
        else:
            logits = self._logits(step)
        sampling = len(step.sampling)
        chosen = self.sampler.choose(logits[:sampling], step.sampling, step.processors, drawn)
        prompts = []
        start = sampling
        for prompt in step.prompts:
            own = logits[start : start + prompt.tokens]
            prompts.append(prompt_logprobs(own, prompt.next_ids, prompt.top, self.sampler.invariant))
            start += prompt.tokens
        self._last = chosen.token_ids
        return Flight(chosen, prompts)

    def _logits(self, step: Step) -> Tensor:
        """[len(step.logits_of), vocab] of the packed tokens, which are one sequence to the model."""
        ids, positions, rows, *attended = upload(
            [
                step.token_ids, step.positions, step.logits_of,
                step.query_starts, step.context_lengths, step.block_table, step.slots,
            ],
            self.device,
        )  # fmt: skip
        batch = self._batch(step, *attended)
        for group in self.groups:
            group.begin(batch)
        if step.follows:
            ids = follow(ids, self._last)
        return self.forward(ids[None], positions[None], rows)[0]

    def _batch(self, step: Step, starts: Tensor, contexts: Tensor, table: Tensor, slots: Tensor) -> AttentionBatch:
        return AttentionBatch(
            query_starts=starts, context_lengths=contexts, block_table=table, slots=slots,
            max_query=int(np.diff(step.query_starts).max()),
            max_context=int(step.context_lengths.max()),
            decodes=step.decodes,
            host_lengths=HostLengths(step.query_starts, step.context_lengths),
        )  # fmt: skip

    def _copy(self, copies: NDArray[np.int64]) -> None:
        if copies.size:
            sources, targets = upload([copies[:, 0].copy(), copies[:, 1].copy()], self.device)
            for group in self.groups:
                group.backend.layout.copy_blocks(group.cache, sources, targets)
