"""Decoding rows: every block is one item of a batched matrix product, in place where it lies in the cache.

The blocks of all rows are put in the order of their ids. Blocks that are neighbours in the cache form runs, and a run
is a view: its keys and values are multiplied where they are, not gathered. A row's blocks are joined by the usual
rescaling of partial softmaxes (FlashAttention, arXiv 2205.14135, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.kv.layout import AxesLayout, KVCache

_MAX_GAP = 4
"""Blocks of others between two of ours that are cheaper to multiply and mask than to start another run for."""
_MAX_RUNS = 32
"""Beyond this many runs one gather is cheaper than one product a run."""
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Items (blocks to multiply) of all decoding rows, and how they join into rows."""

    rows: int
    runs: tuple[tuple[int, int], ...]
    """Ranges of block ids that are viewed."""
    gathered: Tensor
    """[gathered] int64: blocks that are copied, after those of the runs: shared ones once more for each further row."""
    owner: Tensor
    """[items] int64: the row whose query each item meets."""
    unseen: Tensor
    """[items, 1, 1, block_size] bool: slots that the row must not see."""
    parts: Tensor
    """[rows, most blocks of a row] int64: items of a row; `items` stands for none."""
    single: bool
    """Every row has one item, in the order of rows."""

    @classmethod
    def build(
        cls, spec: AttentionSpec, size: int, table: NDArray[np.int32], contexts: list[int], batch: AttentionBatch
    ) -> DecodePlan | None:
        """From the decoding rows' block table [rows, width] and context lengths; None without such rows."""
        if not contexts:
            return None
        entries = _entries(spec, size, table, np.asarray(contexts, dtype=np.int64))
        runs, position, covered, gathered = _place(entries.block)
        items = covered + len(gathered)
        device = batch.block_table.device
        owner = np.zeros(items, dtype=np.int64)
        unseen = np.ones((items, size), dtype=np.bool_)
        owner[position] = entries.row
        unseen[position] = entries.unseen
        parts = np.full((len(contexts), int(entries.order.max(initial=0)) + 1), items, dtype=np.int64)
        parts[entries.row, entries.order] = position
        single = parts.shape[1] == 1 and items == len(contexts) and bool((parts[:, 0] == np.arange(items)).all())
        return cls(
            len(contexts),
            tuple(runs),
            torch.from_numpy(gathered).to(device),
            torch.from_numpy(owner).to(device),
            torch.from_numpy(unseen).to(device)[:, None, None],
            torch.from_numpy(parts).to(device),
            single,
        )


@dataclass(frozen=True, slots=True)
class _Entries:
    """One line for each (row, block) that a decoding row sees, in the order of block ids."""

    block: NDArray[np.int64]
    row: NDArray[np.int64]
    order: NDArray[np.int64]
    """0, 1, 2, ... within a row."""
    unseen: NDArray[np.bool_]
    """[entries, block size]."""


def _entries(spec: AttentionSpec, size: int, table: NDArray[np.int32], contexts: NDArray[np.int64]) -> _Entries:
    oldest = np.zeros_like(contexts) if spec.window is None else np.maximum(contexts - spec.window, 0)
    first, end = oldest // size, -(-contexts // size)
    counts = end - first
    row = np.repeat(np.arange(len(contexts)), counts)
    order = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    number = first[row] + order
    block = table[row, number].astype(np.int64)
    by_block = np.argsort(block, kind="stable")
    block, row, order, number = block[by_block], row[by_block], order[by_block], number[by_block]
    token = number[:, None] * size + np.arange(size)
    return _Entries(block, row, order, (token >= contexts[row, None]) | (token < oldest[row, None]))


def _place(
    block: NDArray[np.int64],
) -> tuple[list[tuple[int, int]], NDArray[np.int64], int, NDArray[np.int64]]:
    """Sorted block ids -> runs of ids, each entry's item, items that the runs cover, and blocks to gather behind them."""
    repeated = np.zeros(len(block), dtype=np.bool_)
    repeated[1:] = block[1:] == block[:-1]
    own = block[~repeated]
    breaks = np.flatnonzero(np.diff(own) > _MAX_GAP + 1) + 1
    if len(breaks) >= _MAX_RUNS:
        return [], np.arange(len(block)), 0, block
    starts, ends = own[np.r_[0, breaks]] if len(own) else own, own[np.r_[breaks - 1, -1]] + 1 if len(own) else own
    sizes = ends - starts
    base = np.cumsum(sizes) - sizes
    run = np.searchsorted(starts, own, side="right") - 1
    position = np.empty(len(block), dtype=np.int64)
    position[~repeated] = base[run] + own - starts[run]
    covered = int(sizes.sum())
    position[repeated] = covered + np.arange(int(repeated.sum()))
    return list(zip(starts.tolist(), ends.tolist(), strict=True)), position, covered, block[repeated]


def decode(
    spec: AttentionSpec, layout: AxesLayout, cache: KVCache, layer: int, query: Tensor, plan: DecodePlan, sinks: Tensor | None
) -> Tensor:
    """query [rows, heads, head_size] -> [rows, heads, head_size] in its dtype."""
    rows, heads, kv = plan.rows, spec.heads, spec.kv_heads
    scaled = (query.float() * spec.scale).view(rows, kv, -1, spec.head_size)
    mine = scaled if plan.single else scaled.index_select(0, plan.owner)
    keys = _items(layout.key_view(cache, layer), layout, plan)
    scores = _products(mine.flatten(0, 1), [part.transpose(1, 2) for part in keys]).view(-1, kv, spec.group, layout.block_size)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # Fill, do not add: an unused slot may hold NaN.
    scores.masked_fill_(plan.unseen, -torch.inf)
    peak = scores.amax(-1)
    top = peak if plan.single else _parts(peak, plan, -torch.inf).amax(1)
    if sinks is not None:
        top = torch.maximum(top, sinks.float().view(1, kv, -1))
    # A row of padding sees nothing: with a finite peak its weights are 0, not NaN.
    top = top.clamp_min(_LOWEST)
    weights = scores.sub_((top if plan.single else top.index_select(0, plan.owner))[..., None]).exp_()
    total = weights.sum(-1)
    values = _items(layout.value_view(cache, layer), layout, plan)
    partial = _products(weights.flatten(0, 1), values).view(-1, kv, spec.group, spec.head_size)
    if not partial.sum().isfinite():
        # Weight 0 times an unused slot's NaN is NaN. Rare, so it is looked for, not guarded against by a copy each time.
        hidden = plan.unseen.transpose(2, 3).expand(-1, kv, -1, 1).flatten(0, 1)
        partial = torch.bmm(weights.flatten(0, 1), torch.cat(values).masked_fill(hidden, 0)).view_as(partial)
    if not plan.single:
        total, partial = _parts(total, plan, 0).sum(1), _parts(partial, plan, 0).sum(1)
    if sinks is not None:
        total = total + (sinks.float().view(1, kv, -1) - top).exp()
    smallest = torch.finfo(torch.float32).tiny
    return partial.div_(total.clamp_min(smallest)[..., None]).view(rows, heads, spec.head_size).to(query.dtype)


def _items(view: Tensor, layout: AxesLayout, plan: DecodePlan) -> list[Tensor]:
    """Items of [block, slot, head, dim...] as [items * kv_heads, block_size, head_size] float32: views where they can be."""
    parts = [view[start:end] for start, end in plan.runs]
    if len(plan.gathered):
        parts.append(view.index_select(0, plan.gathered))
    sizes = (layout.block_size, layout.kv_heads, layout.head_size)
    return [part.reshape(-1, *sizes).transpose(1, 2).reshape(-1, sizes[0], sizes[2]).float() for part in parts]


def _products(left: Tensor, parts: list[Tensor]) -> Tensor:
    """Batched left @ part for consecutive pieces of left: [items, m, k] x [items, k, n] -> [items, m, n]."""
    if len(parts) == 1:
        return torch.bmm(left, parts[0])
    out = left.new_empty(left.shape[0], left.shape[1], parts[0].shape[2] if parts else 0)
    start = 0
    for part in parts:
        end = start + part.shape[0]
        torch.bmm(left[start:end], part, out=out[start:end])
        start = end
    return out


def _parts(items: Tensor, plan: DecodePlan, none: float) -> Tensor:
    """[items, ...] -> [rows, most blocks of a row, ...], `none` where a row has fewer."""
    padded = torch.cat([items, items.new_full((1, *items.shape[1:]), none)])
    return padded[plan.parts]
