"""Decode steps captured as graphs, for a ladder of batch sizes: a replay launches a whole step at once.

What a graph reads lies where it lay at capture. So a step's numbers are copied into tensors that stay, rows of padding
(slot -1, no context) fill it up to the next size that was captured, and each backend refreshes its own plan in place.
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

from octavo.attention.contract import AttentionBatch
from octavo.attention.device import Device
from octavo.engine.step import Step
from octavo.engine.transfer import upload
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
    """The model for steps in which every row has one token."""

    def __init__(
        self, forward: Forward, groups: Sequence[AttentionGroup], device: Device, sizes: Sequence[int], width: int
    ) -> None:
        """`sizes`: rows, ascending; width: blocks of the longest request. Nothing is captured yet."""
        self.forward = forward
        self.groups = groups
        self.device = device
        self.sizes = list(sizes)
        self.width = width
        self.replays = 0
        most, where = self.sizes[-1], device.torch_device
        self._ids, self._positions = (torch.zeros(1, most, dtype=torch.int64, device=where) for _ in range(2))
        self._slots = torch.empty(most, dtype=torch.int64, device=where)
        self._rows = torch.arange(most, device=where)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=where)
        self._contexts = torch.empty(most, dtype=torch.int32, device=where)
        self._table = torch.zeros(most, width, dtype=torch.int32, device=where)
        self._logits: Tensor | None = None
        self._graphs: dict[int, _Graph] = {}
        self._pool = device.graph_pool()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture size after size, the largest first, whose memory serves the others.

        Raises NotCaptured if the device, a backend or the model cannot.
        """
        for size in reversed(self.sizes):
            try:
                self._slots.fill_(-1)
                self._contexts.zero_()
                plans = self._plan(size, 0)
                self._compute(size)
                replay = self.device.capture(partial(self._compute, size), self._pool)
            except Exception as error:
                raise NotCaptured(f"a step of {size} rows: {error}") from error
            if replay is None:
                raise NotCaptured(f"{self.device.name} captures nothing, though it says that it does")
            self._graphs[size] = _Graph(plans, replay)

    def takes(self, step: Step) -> bool:
        """Is it a step of rows of one token, of which there are not too many?"""
        rows, width = step.block_table.shape
        return bool(step.decodes == rows and rows <= self.sizes[-1] and width <= self.width)

    def logits(self, step: Step, last: Tensor) -> Tensor:
        """[len(step.logits_of), vocab]; they are overwritten by the next step. `last`: tokens of the step before."""
        rows = len(step.context_lengths)
        size = self.sizes[bisect_left(self.sizes, rows)]
        self._fill(step, size, last)
        plans, graph = self._plan(size, int(step.context_lengths.max())), self._graphs[size]
        if all(new is held for new, held in zip(plans, graph.plans, strict=True)):
            graph.replay()
            self.replays += 1
        else:
            self._compute(size)
        assert self._logits is not None
        if len(step.logits_of) == rows and (np.diff(step.logits_of) == 1).all():
            return self._logits[:rows]
        return self._logits[upload([step.logits_of], self._logits.device)[0]]

    def _fill(self, step: Step, size: int, last: Tensor) -> None:
        """Rows of padding have no slot and no context; which token and position they have does not matter."""
        rows, width = step.block_table.shape
        ids, positions, slots, contexts, table = upload(
            [
                _padded(step.token_ids, size, 0), _padded(step.positions, size, 0), _padded(step.slots, size, -1),
                _padded(step.context_lengths, size, 0), step.block_table,
            ],
            self.device.torch_device,
        )  # fmt: skip
        self._ids[0, :size].copy_(follow(ids, last) if step.follows else ids)
        self._positions[0, :size].copy_(positions)
        self._slots[:size].copy_(slots)
        self._contexts[:size].copy_(contexts)
        self._table[:rows, :width].copy_(table)

    def _plan(self, size: int, max_context: int) -> list[Any]:
        batch = AttentionBatch(
            query_starts=self._starts[: size + 1], context_lengths=self._contexts[:size],
            block_table=self._table[:size], slots=self._slots[:size],
            max_query=1, max_context=max_context, decodes=size,
        )  # fmt: skip
        for group in self.groups:
            group.begin(batch, size)
        return [group.plan for group in self.groups]

    def _compute(self, size: int) -> None:
        logits = self.forward(self._ids[:, :size], self._positions[:, :size], self._rows[:size])[0]
        if self._logits is None:
            self._logits = torch.empty(self.sizes[-1], *logits.shape[1:], dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)


def follow(ids: Tensor, last: Tensor) -> Tensor:
    """Token ids [tokens] int64 in which each -1 - row is replaced by last [rows] of that row."""
    return torch.where(ids < 0, last[(-1 - ids).clamp_(min=0)], ids)


def _padded(array: NDArray[Any], size: int, value: int) -> NDArray[Any]:
    """[size], its end filled with a value."""
    if len(array) == size:
        return array
    padded = np.full(size, value, array.dtype)
    padded[: len(array)] = array
    return padded
