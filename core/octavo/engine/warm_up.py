"""How much memory a step takes besides weights and cache: measured, on the largest step that the limits allow.

The step decodes as many requests as may run, each with sampling that asks for all, and computes as many prompt tokens
as a step may, at the end of the longest context. Its cache is two blocks: every entry of its block table names the same
one, so nothing depends on the size that is yet to be found.

On an accelerator the whole step runs, in a moment. On a CPU it could take many seconds, and what it holds at a time is
that of one layer, and then of sampling: so the first layer of each kind runs, with a sixteenth and an eighth of the
prompt tokens, and two contexts where they are long. Its memory is a linear function of either while the other stays as
it is. And a few rows are sampled. Both are added, for what the allocator has taken for the one does not always serve
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from octavo.attention.contract import AttentionBatch
from octavo.attention.device import Device
from octavo.engine.runner import Runner
from octavo.engine.sampling_batch import SamplingRow, build_batch
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.step import Step
from octavo.models.bridge import AttentionGroup

BLOCKS = 2
"""Of the cache: block 0, which is nobody's ..."""
_BLOCK = 1
"""... and the one that all tables name."""
_MANY_TOKENS = 512
"""Prompt tokens above which a CPU measures a part and works out the rest."""
_LONG_CONTEXT = 8192
"""Tokens of context above which a CPU does the same: kernels that hold all scores would need what there may not be."""
_FEW_ROWS = 16
_ALL = SamplingParams(
    temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, repetition_penalty=1.1, logprobs=5
)


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest step that the limits allow."""

    prompt_tokens: int
    context: int
    """Tokens of the longest request."""
    rows: int
    """Requests that decode at once."""
    whole_prompts: bool
    """Prompts are computed at once: their last tokens have no context that is older than the step."""


def activations(runner: Runner, worst: Worst, block_size: int, device: Device) -> int:
    """Bytes that such a step holds at most. The runner's groups have a cache of two blocks. Raises what a step does."""
    written = min(block_size, worst.context, worst.prompt_tokens)
    # What all the others read; and what libraries take once and keep is no activation.
    runner.run(step(Worst(written, written, 0, True), block_size))
    if device.name != "cpu":
        return _peak(runner, step(worst, block_size), device)
    few = min(worst.rows, _FEW_ROWS)
    sampled = _peak(runner, step(Worst(0, block_size, few, False), block_size), device) * -(-worst.rows // few)
    with _FirstLayers(runner.groups):
        return sampled + _of_prompts(runner, worst, block_size, device)


def _of_prompts(runner: Runner, worst: Worst, block_size: int, device: Device) -> int:
    """A line through two contexts, where the whole one is long."""
    if worst.whole_prompts or worst.context <= _LONG_CONTEXT:
        return _of_tokens(runner, worst, block_size, device)
    step = _LONG_CONTEXT // 2
    half, long = (
        _of_tokens(runner, replace(worst, context=context), block_size, device) for context in (step, _LONG_CONTEXT)
    )
    return long + max(long - half, 0) * -(-(worst.context - _LONG_CONTEXT) // step)


def _of_tokens(runner: Runner, worst: Worst, block_size: int, device: Device) -> int:
    """A line through two numbers of tokens, where all would take long."""
    tokens = worst.prompt_tokens
    first, second = (tokens, tokens) if tokens <= _MANY_TOKENS else (tokens // 16, tokens // 8)
    less = _prompt_step(worst, first, block_size)
    _run(runner, less)
    least = _peak(runner, less, device)
    if first == second:
        return least
    more = _peak(runner, _prompt_step(worst, second, block_size), device)
    return more + max(more - least, 0) * -(-(tokens - second) // (second - first))


def _prompt_step(worst: Worst, tokens: int, block_size: int) -> Step:
    return step(Worst(tokens, worst.context, 0, worst.whole_prompts), block_size)


def _peak(runner: Runner, wanted: Step, device: Device) -> int:
    return device.peak(lambda: _run(runner, wanted))


def _run(runner: Runner, wanted: Step) -> None:
    with suppress(_Enough):
        runner.run(wanted)


def step(worst: Worst, block_size: int) -> Step:
    """The step as arrays: rows that decode, then prompts until their tokens are as many as asked for."""
    queries, contexts = [1] * worst.rows, [min(block_size, worst.context)] * worst.rows
    left = worst.prompt_tokens
    while left > 0:
        queries.append(min(left, worst.context))
        contexts.append(queries[-1] if worst.whole_prompts else worst.context)
        left -= queries[-1]
    shapes = sorted(zip(queries, contexts, strict=True), key=lambda shape: shape[0] > 1)  # of one token first
    starts = np.cumsum([0, *(count for count, _ in shapes)]).astype(np.int32)
    positions = np.concatenate([np.arange(end - count, end) for count, end in shapes])
    table = np.full((len(shapes), -(-max(contexts) // block_size)), _BLOCK, dtype=np.int32)
    nothing = np.zeros(0, dtype=np.int64)
    rows = [SamplingRow(_ALL, 0, 0, nothing, nothing) for _ in shapes]
    return Step(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slots=_BLOCK * block_size + positions % block_size,
        query_starts=starts,
        context_lengths=np.asarray([end for _, end in shapes], dtype=np.int32),
        block_table=table,
        decodes=queries.count(1),
        copies=np.zeros((0, 2), dtype=np.int64),
        logits_of=starts[1:].astype(np.int64) - 1,
        sampling=build_batch(rows),
        prompts=[],
        processors=[],
    )


class _Enough(Exception):
    """The layers that were wanted have run."""


class _FirstLayers:
    """While it lasts, a step ends when each group has attended in a layer and the next one asks for attention."""

    def __init__(self, groups: Sequence[AttentionGroup]) -> None:
        self._groups = groups
        self._backends = [group.backend for group in groups]
        self._seen: set[int] = set()

    def __enter__(self) -> None:
        for number, group in enumerate(self._groups):
            group.backend = _Counted(group.backend, number, self)  # type: ignore[assignment]

    def __exit__(self, *raised: object) -> None:
        for group, backend in zip(self._groups, self._backends, strict=True):
            group.backend = backend

    def begins(self) -> None:
        """A step."""
        self._seen.clear()

    def attends(self, number: int) -> None:
        """A group, in one of its layers. Raises _Enough when there is nothing new to see."""
        if len(self._seen) == len(self._groups):
            raise _Enough
        self._seen.add(number)


class _Counted:
    """A backend that tells when it is asked to attend."""

    def __init__(self, backend: Any, number: int, told: _FirstLayers) -> None:
        self._backend, self._number, self._told = backend, number, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        self._told.begins()
        return self._backend.plan(batch, bucket)

    def attend(self, *arguments: Any) -> torch.Tensor:
        self._told.attends(self._number)
        out: torch.Tensor = self._backend.attend(*arguments)
        return out
