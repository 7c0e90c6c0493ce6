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

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import AxesLayout, KVCache

_MAX_GAP = 4
"""Blocks of others between two of ours that are cheaper to multiply and mask than to start another run for."""
_MAX_RUNS = 32
"""Beyond this many runs one gather is cheaper than one product a run."""
_LOWEST = torch.finfo(torch.float32).min
_TINY = torch.finfo(torch.float32).tiny


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
    partial: Tensor
    """[n] int64: items with slots that their row must not see; most blocks are full."""
    unseen: Tensor
    """[n, 1, 1, block_size] bool: those slots."""
    bias: Tensor | None
    """[items, kv_heads, group, block_size] float32, added to scores: what ALiBi makes of distances."""
    parts: Tensor
    """[rows, most blocks of a row] int64: items of a row; `items` stands for none."""
    direct: bool
    """Every row has one item, in the order of rows."""

    @classmethod
    def build(cls, spec: AttentionSpec, size: int, table: Tensor, contexts: list[int]) -> DecodePlan:
        """From the decoding rows' block table [rows, width] int32 and context lengths, at least one."""
        entries = _entries(spec, size, table.cpu().numpy(), np.asarray(contexts, dtype=np.int64))
        runs, position, covered, gathered = _place(entries.block)
        items = covered + len(gathered)
        device = table.device
        owner = np.zeros(items, dtype=np.int64)
        unseen = np.ones((items, size), dtype=np.bool_)
        owner[position] = entries.row
        unseen[position] = entries.unseen
        parts = np.full((len(contexts), int(entries.order.max(initial=0)) + 1), items, dtype=np.int64)
        parts[entries.row, entries.order] = position
        direct = parts.shape[1] == 1 and items == len(contexts) and bool((parts[:, 0] == np.arange(items)).all())
        bias = None
        if spec.alibi_slopes is not None:
            distance = np.zeros((items, size), dtype=np.float32)
            distance[position] = entries.distance
            slopes = np.asarray(spec.alibi_slopes, dtype=np.float32).reshape(1, spec.kv_heads, spec.group, 1)
            bias = torch.from_numpy(slopes * distance[:, None, None]).to(device)
        partial = np.flatnonzero(unseen.any(axis=1))
        return cls(
            len(contexts),
            tuple(runs),
            torch.from_numpy(gathered).to(device),
            torch.from_numpy(owner).to(device),
            torch.from_numpy(partial).to(device),
            torch.from_numpy(unseen[partial]).to(device)[:, None, None],
            bias,
            torch.from_numpy(parts).to(device),
            direct,
        )

    def spread(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> what each item's row has, [items, ...]."""
        if self.direct:
            return rows
        return rows.expand(len(self.owner), *rows.shape[1:]) if self.rows == 1 else rows.index_select(0, self.owner)

    def join_max(self, items: Tensor) -> Tensor:
        """[items, ...] -> [rows, ...], the largest of each row's items."""
        if self.direct:
            return items
        return items.amax(0, keepdim=True) if self.rows == 1 else self._parts(items, -torch.inf).amax(1)

    def join_sum(self, items: Tensor) -> Tensor:
        """[items, ...] -> [rows, ...], the sum of each row's items."""
        if self.direct:
            return items
        return items.sum(0, keepdim=True) if self.rows == 1 else self._parts(items, 0).sum(1)

    def _parts(self, items: Tensor, none: float) -> Tensor:
        """[items, ...] -> [rows, most blocks of a row, ...], `none` where a row has fewer."""
        padded = torch.cat([items, items.new_full((1, *items.shape[1:]), none)])
        return padded.index_select(0, self.parts.view(-1)).view(*self.parts.shape, *items.shape[1:])


@dataclass(frozen=True, slots=True)
class _Entries:
    """One line for each (row, block) that a decoding row sees, in the order of block ids."""

    block: NDArray[np.int64]
    row: NDArray[np.int64]
    order: NDArray[np.int64]
    """0, 1, 2, ... within a row."""
    unseen: NDArray[np.bool_]
    """[entries, block size]."""
    distance: NDArray[np.int64]
    """[entries, block size]: position of each slot's token less that of the row's last one, its query."""


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
    unseen = (token >= contexts[row, None]) | (token < oldest[row, None])
    return _Entries(block, row, order, unseen, token - (contexts[row, None] - 1))


def _place(
    block: NDArray[np.int64],
) -> tuple[list[tuple[int, int]], NDArray[np.int64], int, NDArray[np.int64]]:
    """Sorted block ids -> runs of ids, each entry's item, items in runs, and blocks to gather behind them."""
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
    spec: AttentionSpec,
    layout: AxesLayout,
    cache: KVCache,
    layer: int,
    query: Tensor,
    plan: DecodePlan,
    sinks: Tensor | None,
) -> Tensor:
    """query [rows, heads, head_size] -> [rows, heads, head_size] in its dtype."""
    rows, kv, group, size = plan.rows, spec.kv_heads, spec.group, spec.head_size
    scaled = (query.float() * spec.scale).view(rows, kv, group, size)
    keys = [part.transpose(1, 2) for part in _items(layout.key_view(cache, layer), layout, plan)]
    scores = _products(plan.spread(scaled).reshape(-1, group, size), keys).view(-1, kv, group, layout.block_size)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if plan.bias is not None:
        scores += plan.bias
    # Fill, do not add: an unused slot may hold NaN.
    scores.index_copy_(0, plan.partial, scores.index_select(0, plan.partial).masked_fill_(plan.unseen, -torch.inf))
    # A row of padding sees nothing: with a finite peak its weights are 0, not NaN.
    peak = plan.join_max(scores.amax(-1)).clamp_min(_LOWEST)
    sink = None if sinks is None else sinks.float().view(1, kv, group)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    weights = scores.sub_(plan.spread(peak)[..., None]).exp_()
    total = plan.join_sum(weights.sum(-1))
    if sink is not None:
        total = total + (sink - peak).exp()
    values = _items(layout.value_view(cache, layer), layout, plan)
    weighted = plan.join_sum(_products(weights.view(-1, group, layout.block_size), values).view(-1, kv, group, size))
    if not weighted.sum().isfinite():
        # Weight 0 times an unused slot's NaN is NaN: rare, so it is looked for, not guarded against by a copy.
        weighted = plan.join_sum(_careful(weights, torch.cat(values), plan))
    out = weighted.div_(total.clamp_min_(_TINY)[..., None])
    return out.view(rows, spec.heads, size).to(query.dtype)


def _careful(weights: Tensor, values: Tensor, plan: DecodePlan) -> Tensor:
    """weights [items, kv, group, block_size] times values [items * kv, block_size, size], unseen slots as zeros."""
    items, kv, group, block_size = weights.shape
    seen = values.view(items, kv, block_size, -1).clone()
    hidden = plan.unseen.view(-1, 1, block_size, 1)
    seen.index_copy_(0, plan.partial, seen.index_select(0, plan.partial).masked_fill_(hidden, 0))
    return torch.bmm(weights.view(-1, group, block_size), seen.flatten(0, 1)).view(items, kv, group, -1)


def _items(view: Tensor, layout: AxesLayout, plan: DecodePlan) -> list[Tensor]:
    """Items of [block, slot, head, dim...] as [items * kv_heads, block_size, head_size] float32, views if possible."""
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
