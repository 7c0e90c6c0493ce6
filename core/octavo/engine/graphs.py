"""Decode steps captured as graphs, for a ladder of batch sizes: a replay launches a whole step at once.

What a graph reads lies where it lay at capture. So a step's numbers are copied into tensors that stay, rows of padding
(slot -1, no context) fill it up to the next size that was captured, and each backend refreshes its own plan in place.
The tokens that a step draws stay where the next one finds them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch, HostLengths
from octavo.attention.device import Device
from octavo.engine.drawing import PlainDraw
from octavo.engine.step import Step
from octavo.engine.transfer import pins, staged, tensor, views
from octavo.models.bridge import AttentionGroup
from octavo.models.capture import Forward

MOST_ROWS = 512
"""Above this a step is long enough for Python to keep ahead of it."""


def ladder(most: int) -> list[int]:
    """Batch sizes to capture up to `most`: padding is at most 7 rows up to 64, then a quarter of the step."""
    most = min(most, MOST_ROWS)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    return sorted({*(size for size in sizes if size < most), most})


class NotCaptured(RuntimeError):
    """Steps that cannot be captured, with the reason."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One size's."""

    plans: Sequence[Any]
    """Of each group, at capture."""
    replay: Callable[[], None]


class DecodeGraphs:
    """Model and draws for steps in which every row has one token."""

    def __init__(
        self,
        forward: Forward,
        draw: PlainDraw,
        groups: Sequence[AttentionGroup],
        device: Device,
        sizes: Sequence[int],
        width: int,
    ) -> None:
        """`sizes`: rows, ascending; width: blocks of the longest request. Nothing is captured yet."""
        self.forward = forward
        self.draw = draw
        self.groups = groups
        self.device = device
        self.sizes = list(sizes)
        self.width = width
        self.replays = 0
        self._graphs: dict[int, _Graph] = {}
        self._pool = device.graph_pool()
        self._told_table: NDArray[np.int32] | None = None
        self._logits: Tensor | None = None
        self._host_starts = np.arange(self.sizes[-1] + 1, dtype=np.int32)
        """What `_starts` holds."""
        self._allocate(self.sizes[-1], width, device.torch_device)

    @torch.inference_mode()
    def _allocate(self, most: int, width: int, where: torch.device) -> None:
        """Tensors of the kind that steps have, for which `draw` is compiled."""
        blank = _Numbers(most)
        self._packed = staged(blank.arrays, pin=False).to(where)
        ids, positions, self._slots, self._uniforms, self._contexts, self._temperature = views(
            self._packed, blank.arrays
        )
        self._ids, self._positions = ids[None], positions[None]
        self._rows = torch.arange(most, device=where)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=where)
        self._table = torch.zeros(most, width, dtype=torch.int32, device=where)
        self._tokens = torch.zeros(max(most, MOST_ROWS), dtype=torch.int64, device=where)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture size after size, the largest first, whose memory serves the others.

        Raises NotCaptured if the device, a backend or the model cannot.
        """
        for size in reversed(self.sizes):
            try:
                plans = self._plan(size, np.zeros(0, np.int32))
                self._compute(size)
                replay = self.device.capture(partial(self._compute, size), self._pool)
            except Exception as error:
                raise NotCaptured(f"a step of {size} rows: {error}") from error
            if replay is None:
                raise NotCaptured(f"{self.device.name} captures nothing, though it says that it does")
            self._graphs[size] = _Graph(plans, replay)

    def takes(self, step: Step, last: Tensor) -> bool:
        """Is it a step of rows of one token, of which there are not too many, nor in the step before?"""
        rows, width = step.block_table.shape
        fits = rows <= self.sizes[-1] and width <= self.width and len(last) <= len(self._tokens)
        return bool(step.decodes == rows and fits)

    def run(self, step: Step, last: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [len(step.logits_of), vocab], and tokens [rows] int64 for rows that want no more than a temperature.

        The tokens are None where logits are wanted of other rows than all in their order. The next step overwrites
        both. `last`: tokens of the step before.
        """
        rows = len(step.context_lengths)
        size = self.sizes[bisect_left(self.sizes, rows)]
        in_order = len(step.sampling) == rows == len(step.logits_of) and bool((np.diff(step.logits_of) == 1).all())
        self._fill(step, in_order, last)
        plans, graph = self._plan(size, step.context_lengths), self._graphs[size]
        if all(new is held for new, held in zip(plans, graph.plans, strict=True)):
            graph.replay()
            self.replays += 1
        else:
            self._compute(size)
        assert self._logits is not None
        if in_order:
            return self._logits[:rows], self._tokens[:rows]
        return self._logits[tensor(step.logits_of, self._logits.device)], None

    def _fill(self, step: Step, draws: bool, last: Tensor) -> None:
        """Everything in one transfer, but for the block table, which seldom changes."""
        numbers, device = _Numbers.of(step, self.sizes[-1], draws), self.device.torch_device
        pin = pins(device)
        self._packed.copy_(staged(numbers.arrays, pin=pin), non_blocking=pin)
        if step.follows and last.data_ptr() != self._tokens.data_ptr():
            self._tokens[: len(last)].copy_(last)
        if self._told_table is None or not np.array_equal(self._told_table, step.block_table):
            rows, width = step.block_table.shape
            self._told_table = None
            self._table[:rows, :width].copy_(tensor(step.block_table, device))
            self._told_table = step.block_table

    def _plan(self, size: int, contexts: NDArray[np.int32]) -> list[Any]:
        """contexts: of the rows that are no padding."""
        lengths = np.zeros(size, np.int32)
        lengths[: len(contexts)] = contexts
        batch = AttentionBatch(
            query_starts=self._starts[: size + 1], context_lengths=self._contexts[:size],
            block_table=self._table[:size], slots=self._slots[:size],
            max_query=1, max_context=int(lengths.max()), decodes=size,
            host_lengths=HostLengths(self._host_starts[: size + 1], lengths),
        )  # fmt: skip
        for group in self.groups:
            group.begin(batch, size)
        return [group.plan for group in self.groups]

    def _compute(self, size: int) -> None:
        ids = follow(self._ids[:, :size], self._tokens)
        logits = self.forward(ids, self._positions[:, :size], self._rows[:size])[0]
        if self._logits is None:
            self._logits = torch.empty(self.sizes[-1], *logits.shape[1:], dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)
        self._tokens[:size].copy_(self.draw(self._logits[:size], self._temperature[:size], self._uniforms[:size]))


class _Numbers:
    """What a step's rows differ in, for so many rows. Those of padding have no slot and no context."""

    def __init__(self, most: int) -> None:
        self.ids, self.positions = (np.zeros(most, np.int64) for _ in range(2))
        self.slots = np.full(most, -1, np.int64)
        self.uniforms = np.zeros(most, np.float64)
        self.contexts = np.zeros(most, np.int32)
        self.temperature = np.zeros(most, np.float32)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All of them, always in this order."""
        return [self.ids, self.positions, self.slots, self.uniforms, self.contexts, self.temperature]

    @classmethod
    def of(cls, step: Step, most: int, draws: bool) -> _Numbers:
        """A step's; `draws`: its rows are those that sample, in the same order."""
        numbers, rows = cls(most), len(step.context_lengths)
        numbers.ids[:rows], numbers.positions[:rows], numbers.slots[:rows] = step.token_ids, step.positions, step.slots
        numbers.contexts[:rows] = step.context_lengths
        if draws:
            numbers.uniforms[:rows], numbers.temperature[:rows] = step.sampling.uniforms, step.sampling.temperature
        return numbers


def follow(ids: Tensor, last: Tensor) -> Tensor:
    """Token ids int64 in which each -1 - row is replaced by last [rows] of that row."""
    return torch.where(ids < 0, last[(-1 - ids).clamp_(min=0)], ids)
