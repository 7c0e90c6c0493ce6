"""A step as the library takes it: what it does not look at, and would crash or err on, is looked at here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch

Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some of a step's rows, those without a query left out; tensors are int32, contiguous and where the table is."""

    query_starts: Tensor
    """[rows + 1], starts at 0."""
    key_starts: Tensor
    """[rows + 1]: the sums of context lengths, starts at 0."""
    contexts: Tensor
    """[rows]: at least 1, since a row without keys comes out as NaN."""
    table: Tensor
    """[rows, width]: no wider than the longest context needs."""
    tokens: int
    """That ask."""
    most_queries: int
    """Of a row: at least 1, or the library divides by 0. Too small a number leaves rows unwritten."""
    longest: int
    """Context. Too small a number is read beyond."""
    highest_block: int
    fresh: bool
    """Is there nothing behind their queries, which are all of their contexts?"""
    padding: Tensor | None
    """[tokens] bool: those of rows without a context; None where there are none."""

    @classmethod
    def of(cls, batch: AttentionBatch, first: int, end: int, block_size: int) -> Rows | None:
        """Of the batch's rows from `first` to `end`; None if none of them asks.

        Raises ValueError for lengths that contradict each other, and for a table that is too narrow for them.
        """
        starts, contexts = on_host(batch)
        starts, contexts = starts[first : end + 1] - starts[first], contexts[first:end]
        counts = np.diff(starts)
        asking = np.flatnonzero(counts)
        if not len(asking):
            return None
        table = batch.block_table[first:end]
        if len(asking) < len(counts):
            counts, contexts, table = counts[asking], contexts[asking], table[torch.from_numpy(asking)]
        ids = table.cpu()  # once a step, if the device is another
        _check(counts, contexts, ids, block_size)
        empty = contexts == 0
        seen = np.maximum(contexts, 1)
        longest, device = int(seen.max()), table.device
        return cls(
            query_starts=_summed(counts).to(device),
            key_starts=_summed(seen).to(device),
            contexts=torch.from_numpy(seen).to(device),
            table=table[:, : -(-longest // block_size)].to(torch.int32).contiguous(),
            tokens=int(counts.sum()),
            most_queries=int(counts.max()),
            longest=longest,
            highest_block=int(ids.max()),
            fresh=bool((counts == seen).all()),
            padding=torch.from_numpy(np.repeat(empty, counts)).to(device) if empty.any() else None,
        )


def on_host(batch: AttentionBatch) -> tuple[Integers, Integers]:
    """query_starts [rows + 1] and context_lengths [rows]."""
    if batch.host_lengths is not None:
        return batch.host_lengths
    starts, contexts = (
        lengths.to("cpu", torch.int32).numpy() for lengths in (batch.query_starts, batch.context_lengths)
    )
    return starts, contexts


def _check(counts: Integers, contexts: Integers, ids: Tensor, block_size: int) -> None:
    """Of rows that ask, whose blocks are `ids`; a row of padding has no context."""
    short = np.flatnonzero((counts > contexts) & (contexts != 0))
    if len(short):
        row = int(short[0])
        raise ValueError(f"{counts[row]} queries cannot be the last of a context of {contexts[row]} tokens")
    room = ids.shape[1] * block_size
    if room < max(contexts.max(), 1):
        raise ValueError(f"a context of {contexts.max()} tokens is not in a block table of {room}")
    if int(counts.min()) < 0 or int(contexts.min()) < 0 or int(ids.min()) < 0:
        raise ValueError("query starts fall, or a context length or a block of the table is negative")


def _summed(counts: Integers) -> Tensor:
    """[n] -> [n + 1] int32. Raises ValueError where that is too small."""
    sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if sums[-1] >= 2**31:
        raise ValueError(f"{sums[-1]} tokens of a step's contexts are more than the library counts")
    return torch.from_numpy(sums.astype(np.int32))
