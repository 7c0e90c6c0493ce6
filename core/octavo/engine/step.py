"""What one step computes, as plain arrays: everything that crosses from the scheduler to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.engine.sampling_batch import SamplingBatch, SamplingRow, build_batch
from octavo.engine.scheduler import Schedule, ScheduledRow
from octavo.hooks import LogitsProcessor


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Prompt positions whose log-probabilities a request wants."""

    row: int
    """Index of the scheduled row."""
    first: int
    """Its first token that counts."""
    tokens: int
    next_ids: NDArray[np.int64]
    """[tokens]: the prompt token that follows each position."""
    top: int


@dataclass(frozen=True, slots=True)
class Step:
    """One packed forward and the sampling behind it. All arrays are int64 unless said otherwise."""

    token_ids: NDArray[np.int64]
    """[tokens], the rows one after another, rows of one token first. -1 - row: what that row of the step before got."""
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    """[rows + 1]."""
    context_lengths: NDArray[np.int32]
    """[rows], this step's tokens included."""
    block_table: NDArray[np.int32]
    """[rows, width]."""
    decodes: int
    copies: NDArray[np.int64]
    """[n, 2]: blocks to copy before anything is written, source and target."""
    logits_of: NDArray[np.int64]
    """Tokens whose logits are wanted: of each sampling row, then of `prompts`."""
    sampling: SamplingBatch
    prompts: Sequence[PromptRow]
    processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]]
    """(sampling row, processor, generated tokens)."""

    @property
    def follows(self) -> bool:
        """Does it begin with tokens that the host does not know yet?"""
        return bool((self.token_ids < 0).any())


@dataclass(slots=True)
class Processed:
    """The logits processors of a request, and its generated tokens as they are told them."""

    processors: Sequence[LogitsProcessor]
    output_ids: list[int] = field(default_factory=list)

    def told(self, generated: NDArray[np.int32]) -> list[int]:
        """All generated tokens; only those that came since are converted, so that a step costs no more later on."""
        self.output_ids += generated[len(self.output_ids) :].tolist()
        return self.output_ids


def build(schedule: Schedule, block_size: int, processed: Mapping[int, Processed]) -> Step:
    """Turn a schedule into arrays. The scheduled rows that sample keep their order."""
    rows = schedule.rows
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([row.count for row in rows], out=starts[1:])
    sampling = [row for row in rows if row.samples]
    last = [int(starts[index + 1]) - 1 for index, row in enumerate(rows) if row.samples]
    prompts = [prompt for index, row in enumerate(rows) if (prompt := _prompt_row(index, row)) is not None]
    wanted = [np.asarray(last, dtype=np.int64)] + [starts[p.row] + p.first + np.arange(p.tokens) for p in prompts]
    positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
    table = _block_table(rows)
    blocks = table[np.repeat(np.arange(len(rows)), np.diff(starts)), positions // block_size]
    return Step(
        token_ids=_concatenate(rows, lambda row: row.request.tokens[row.start : row.start + row.count]),
        positions=positions,
        slots=blocks.astype(np.int64) * block_size + positions % block_size,
        query_starts=starts,
        context_lengths=np.fromiter((row.start + row.count for row in rows), np.int32, len(rows)),
        block_table=table,
        decodes=schedule.decodes,
        copies=np.asarray(schedule.copies, dtype=np.int64).reshape(-1, 2),
        logits_of=np.concatenate(wanted),
        sampling=build_batch([_sampling_row(row.request) for row in sampling]),
        prompts=prompts,
        processors=[
            (index, processor, one.told(row.request.generated))
            for index, row in enumerate(sampling)
            if (one := processed.get(row.request.id)) is not None
            for processor in one.processors
        ],
    )


def _concatenate(rows: Sequence[ScheduledRow], part: Callable[[ScheduledRow], NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.concatenate([part(row) for row in rows]).astype(np.int64)


def _block_table(rows: Sequence[ScheduledRow]) -> NDArray[np.int32]:
    held = [row.request.table.blocks for row in rows if row.request.table is not None]
    table = np.zeros((len(held), max(blocks.size for blocks in held)), dtype=np.int32)
    for line, blocks in zip(table, held, strict=True):
        line[: blocks.size] = blocks
    return table


def _prompt_row(index: int, row: ScheduledRow) -> PromptRow | None:
    """Positions that a preempted request reported before count once; the last one's successor is not of the prompt."""
    request, top = row.request, row.request.params.prompt_logprobs
    first, end = max(row.start, request.prompt_reported), min(row.start + row.count, request.prompt_length - 1)
    if top is None or end <= first:
        return None
    return PromptRow(index, first - row.start, end - first, request.tokens[first + 1 : end + 1].astype(np.int64), top)


def _sampling_row(request: Request) -> SamplingRow:
    position = request.length - request.prompt_length
    banned = tuple(request.end_ids) if position < request.params.min_tokens else ()
    prompt = request.tokens[: request.prompt_length]
    return SamplingRow(request.params, request.seed, position, prompt, request.generated, banned)
