"""Steps of one shape, whatever they compute: what a token gets does not depend on what else is in its step.

The model always sees the same number of tokens, and gives logits of as many. So each of its kernels always has the same
shapes, is the same kernel, and takes the sums of one row in the same order, whatever stands in the others. What a step
lacks is rows of padding behind its own (slot -1, no context), and then rows without a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch
from octavo.attention.device import Device
from octavo.engine.drawing import PlainDraw
from octavo.engine.graphs import NotCaptured, follow
from octavo.engine.step import Step
from octavo.engine.transfer import pins, staged, tensor, views
from octavo.models.bridge import AttentionGroup
from octavo.models.capture import Forward

ALIGNED = 16
"""Of whose multiples the number of tokens is one: kernels that take several rows at once have none left over."""


@dataclass(frozen=True, slots=True)
class _Graph:
    plans: Sequence[Any]
    """Of each group, at capture."""
    replay: Callable[[], None]


class FixedSteps:
    """Model and draws for steps of up to `tokens` tokens, all of which are computed, as they are or as a graph."""

    def __init__(
        self,
        forward: Forward,
        draw: PlainDraw,
        groups: Sequence[AttentionGroup],
        device: Device,
        tokens: int,
        width: int,
    ) -> None:
        """`tokens`: a multiple of ALIGNED; width: blocks of the longest request."""
        self.forward = forward
        self.draw = draw
        self.groups = groups
        self.device = device
        self.tokens = tokens
        self.replays = 0
        self._graph: _Graph | None = None
        self._told_table: NDArray[np.int32] | None = None
        self._logits: Tensor | None = None
        self._allocate(width, device.torch_device)

    @torch.inference_mode()
    def _allocate(self, width: int, where: torch.device) -> None:
        """Tensors that stay, for a graph to read."""
        blank = _Numbers(self.tokens)
        self._packed = staged(blank.arrays, pin=False).to(where)
        ids, positions, self._slots, self._rows, self._uniforms, self._temperature, self._contexts, self._starts = (
            views(self._packed, blank.arrays)
        )
        self._ids, self._positions = ids[None], positions[None]
        self._table = torch.zeros(self.tokens, width, dtype=torch.int32, device=where)
        self._drawn = torch.zeros(self.tokens, dtype=torch.int64, device=where)

    @property
    def captured(self) -> bool:
        """Are steps replayed?"""
        return self._graph is not None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step, in place of the one that is captured. Raises NotCaptured if the device, a backend or the
        model cannot."""
        self._graph = None
        try:
            plans = self._plan(1, 0, 0)
            self._compute()
            replay = self.device.capture(self._compute, self.device.graph_pool())
        except Exception as error:
            raise NotCaptured(f"a step of {self.tokens} tokens: {error}") from error
        if replay is None:
            raise NotCaptured(f"{self.device.name} captures nothing, though it says that it does")
        self._graph = _Graph(plans, replay)

    def run(self, step: Step, last: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [len(step.logits_of), vocab], and tokens int64 of the sampling rows for those that want no more than a
        temperature. The next step overwrites both. `last`: tokens of the step before.
        """
        self._fill(step, last)
        longest_query, longest = int(np.diff(step.query_starts).max()), int(step.context_lengths.max())
        plans, graph = self._plan(longest_query, longest, step.decodes), self._graph
        if graph is not None and all(new is held for new, held in zip(plans, graph.plans, strict=True)):
            graph.replay()
            self.replays += 1
        else:
            self._compute()
        assert self._logits is not None
        return self._logits[: len(step.logits_of)], self._drawn[: len(step.sampling)]

    def _fill(self, step: Step, last: Tensor) -> None:
        """Everything in one transfer, but for the block table, which seldom changes."""
        device = self.device.torch_device
        pin = pins(device)
        self._packed.copy_(staged(_Numbers.of(step, self.tokens).arrays, pin=pin), non_blocking=pin)
        if step.follows and last.data_ptr() != self._drawn.data_ptr():
            self._drawn[: len(last)].copy_(last)
        if self._told_table is None or not np.array_equal(self._told_table, step.block_table):
            rows, width = step.block_table.shape
            self._told_table = None
            self._table[:rows, :width].copy_(tensor(step.block_table, device))
            self._told_table = step.block_table

    def _plan(self, max_query: int, max_context: int, decodes: int) -> list[Any]:
        batch = AttentionBatch(
            query_starts=self._starts, context_lengths=self._contexts, block_table=self._table, slots=self._slots,
            max_query=max_query, max_context=max_context, decodes=decodes,
        )  # fmt: skip
        for group in self.groups:
            group.begin(batch, self.tokens if self.device.captures else None)
        return [group.plan for group in self.groups]

    def _compute(self) -> None:
        logits = self.forward(follow(self._ids, self._drawn), self._positions, self._rows)[0]
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._drawn.copy_(self.draw(self._logits, self._temperature, self._uniforms))


class _Numbers:
    """A step's, for a number of tokens and as many rows, of tokens and of logits."""

    def __init__(self, tokens: int) -> None:
        self.ids, self.positions, self.rows = (np.zeros(tokens, np.int64) for _ in range(3))
        self.slots = np.full(tokens, -1, np.int64)
        self.uniforms = np.zeros(tokens, np.float64)
        self.temperature = np.zeros(tokens, np.float32)
        self.contexts = np.zeros(tokens, np.int32)
        self.starts = np.arange(tokens + 1, dtype=np.int32)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All of them, always in this order."""
        tokens = [self.ids, self.positions, self.slots, self.rows]
        return [*tokens, self.uniforms, self.temperature, self.contexts, self.starts]

    @classmethod
    def of(cls, step: Step, tokens: int) -> _Numbers:
        """A step of no more than `tokens`. Raises ValueError for one that has more."""
        numbers, own, rows = cls(tokens), len(step.token_ids), len(step.context_lengths)
        if own > tokens:
            raise ValueError(f"a step of {own} tokens, each has {tokens}: schedule no more")
        numbers.ids[:own], numbers.positions[:own], numbers.slots[:own] = step.token_ids, step.positions, step.slots
        numbers.rows[: len(step.logits_of)] = step.logits_of
        sampling = len(step.sampling)
        numbers.uniforms[:sampling] = step.sampling.uniforms
        numbers.temperature[:sampling] = step.sampling.temperature
        numbers.contexts[:rows] = step.context_lengths
        numbers.starts[: rows + 1] = step.query_starts
        padding = own + 1 + np.arange(tokens - rows)
        numbers.starts[rows + 1 :] = np.minimum(padding, tokens)
        return numbers
