"""Rows that decode: each context is split into parts of about equal length, and the last part to end joins them."""

import triton
import triton.language as tl

from octavo_triton.kernels.common import absorb, begin, finite, is_upright, settle, sink

_BEGUN = tl.constexpr(64)
"""What a part costs before its first key, in tokens that a program reads meanwhile ..."""
_ROUND = tl.constexpr(48)
"""... and each round of joining a row's parts."""
FIELDS = tl.constexpr(8)
"""Of an item, one of which is spare: they lie together, since a part begins with them."""


@triton.jit(do_not_specialize=["width", "rows", "room", "wanted", "few"])
def split(
    items,
    contexts,
    table,
    width,
    rows,
    room,
    wanted,
    few,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SHARES: tl.constexpr,
    UNIT: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Who does what: items [room, FIELDS] int32, which `Decodes.items` describes; few: see there too.

    `wanted` items run at a time. Rows' tokens are shared out in parts of about equal length, multiples of UNIT tokens;
    of SHARES such lengths that one is taken which is done first, so that one long context among short ones is many
    items. Each program fills ITEMS of them. A row has one item at least, so that its output is written.
    """
    begin(EARLY)
    row = tl.arange(0, ROWS)
    real = row < rows
    context = tl.load(contexts + row, mask=real, other=0)
    oldest = tl.zeros_like(context)
    if WINDOW is not None:
        oldest = tl.maximum(context - WINDOW, 0) // UNIT * UNIT
    tokens = context - oldest
    parts = parts_of(tokens, best_share(tokens, real, room, wanted, SHARES, UNIT, JOINED), real, UNIT)
    ends = tl.cumsum(parts, 0)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), 1)
    own = owner[:, None] == row[None, :]
    part = item - tl.sum(tl.where(own, (ends - parts)[None, :], 0), 1)
    count = tl.sum(tl.where(own, parts[None, :], 0), 1)
    start = tl.sum(tl.where(own, oldest[None, :], 0), 1)
    end = tl.sum(tl.where(own, context[None, :], 0), 1)
    # A row's parts are made alike, the last one too: the longest sets the pace.
    even = tl.cdiv(tl.cdiv(end - start, tl.maximum(count, 1)), UNIT) * UNIT
    first = tl.minimum(start + part * even, end)
    streamed = (tl.sum(tokens.to(tl.int64)) <= few).to(tl.int32)
    entry = table + owner.to(tl.int64) * width + first // BLOCK_SIZE
    block = tl.load(entry, mask=(owner < rows) & (first < end), other=0)
    to = items + item * FIELDS
    fits = item < room
    tl.store(to, tl.where(owner < rows, owner, -1), mask=fits)
    tl.store(to + 1, first, mask=fits)
    tl.store(to + 2, tl.minimum(first + even, end), mask=fits)
    tl.store(to + 3, part, mask=fits)
    tl.store(to + 4, count, mask=fits)
    tl.store(to + 5, streamed, mask=fits)
    tl.store(to + 6, block, mask=fits)


@triton.jit
def best_share(tokens, real, room, wanted, SHARES: tl.constexpr, UNIT: tl.constexpr, JOINED: tl.constexpr):
    """Tokens of a part: of twice an equal share for all that run at a time, down to a 100th, what is done first.

    A turn of items takes as long as they are on average, the last one as much longer as the longest is.
    """
    all_tokens = tl.sum(tokens.to(tl.int64)).to(tl.float32)
    finer = tl.exp2(1 - tl.arange(0, SHARES) * (8 / SHARES))
    share = tl.minimum(tl.maximum(all_tokens / wanted * finer, 1), 1 << 30).to(tl.int32)
    parts = parts_of(tokens[None, :], share[:, None], real[None, :], UNIT)
    count = tl.sum(parts, 1).to(tl.float32)
    length = tl.ceil(tokens[None, :] / tl.maximum(parts, 1).to(tl.float32))
    longest, mean = tl.max(length, 1), all_tokens / count
    turns, rounds = tl.ceil(count / wanted), tl.ceil(tl.max(parts, 1) / JOINED)
    cost = turns * (mean + _BEGUN) + (longest - mean) + tl.where(tl.max(parts, 1) > 1, rounds * _ROUND, 0)
    best = tl.argmin(tl.where(count > room, float("inf"), cost), 0)
    return tl.sum(tl.where(tl.arange(0, SHARES) == best, share, 0))


@triton.jit
def parts_of(tokens, share, real, UNIT: tl.constexpr):
    """How many parts of at most about `share` tokens each row has; one at least, and none where it is not real."""
    size = tl.cdiv(share, UNIT) * UNIT
    parts = tl.ceil(tokens.to(tl.float32) / size.to(tl.float32)).to(tl.int32)
    return tl.where(real, tl.maximum(parts, 1), 0)


@triton.jit(do_not_specialize=["width"])
def decode(
    out,
    query,
    keys,
    values,
    table,
    contexts,
    items,
    partial,
    arrived,
    sinks,
    query_token,
    query_head,
    width,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    JOINED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One part of one row's context, for the query heads of one key head. Grid: items times key heads.

    query: one token a row; out [rows, heads, size], contiguous. partial: float32 [room, KV_HEADS, GROUP, SIZE + 2],
    what a part gives: the weighted sum, its peak and total. arrived: int32 [rows, KV_HEADS], all 0, and so again at
    the end. HEADS and DIMS: powers of two that hold GROUP and SIZE. JOINED parts are joined at a time.
    """
    begin(EARLY)
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    own_item = items + item * FIELDS
    row = tl.load(own_item)
    # Before it is known whether they are needed: with few rows, each wait for memory shows.
    first = tl.load(own_item + 1)
    end = tl.load(own_item + 2)
    part = tl.load(own_item + 3)
    parts = tl.load(own_item + 4)
    if row < 0:
        return
    last = tl.load(contexts + row) - 1
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    real = (head < GROUP)[:, None] & (dim < SIZE)[None, :]
    query += row.to(tl.int64) * query_token + kv_head.to(tl.int64) * GROUP * query_head
    own = tl.load(query + head[:, None] * query_head + dim[None, :], mask=real, other=0.0)
    table += row.to(tl.int64) * width
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, DIMS], tl.float32)
    positions = tl.zeros([HEADS], tl.int32) + last
    WHOLE: tl.constexpr = is_upright(VALUE, BLOCK_SIZE)  # such tiles are better read without a bound
    tiles = end // TILE if WHOLE else tl.cdiv(end, TILE)
    for tile in tl.range(first // TILE, tiles, num_stages=STAGES):
        peak, total, weighted = absorb(
            peak, total, weighted, own, keys, values, table, tile, end, positions, scale, kv_head,
            KEY, VALUE, SIZE, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, False, not WHOLE,
        )  # fmt: skip
    if WHOLE:
        # What is known when it is compiled is not joined with what is not.
        if tiles * TILE < end:
            peak, total, weighted = absorb(
                peak, total, weighted, own, keys, values, table, tiles, end, positions, scale, kv_head,
                KEY, VALUE, SIZE, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, False, True,
            )  # fmt: skip
    out += (row.to(tl.int64) * KV_HEADS + kv_head) * GROUP * SIZE
    if parts == 1:
        if SINKS:
            own_sinks = tl.load(sinks + kv_head * GROUP + head, mask=head < GROUP, other=float("-inf"))
            peak, total, weighted = sink(peak, total, weighted, own_sinks)
        result = weighted / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + head[:, None] * SIZE + dim[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        give(partial, item * KV_HEADS + kv_head, peak, total, weighted, GROUP, SIZE)
        settle(total)  # all threads' stores, before the one that counts
        count = arrived + row * KV_HEADS + kv_head
        if tl.atomic_add(count, 1, sem="acq_rel") == parts - 1:
            first_share = (item - part) * KV_HEADS + kv_head
            join(out, partial, first_share, parts, sinks, kv_head, KV_HEADS, GROUP, SIZE, SINKS, DIMS, JOINED)
            tl.store(count, 0)


@triton.jit
def give(partial, index, peak, total, weighted, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """A part's share of a row, for one key head."""
    head = tl.arange(0, weighted.shape[0])
    dim = tl.arange(0, weighted.shape[1])
    real = (head < GROUP)[:, None] & (dim < SIZE)[None, :]
    to = partial + index.to(tl.int64) * (GROUP * (SIZE + 2))
    tl.store(to + head[:, None] * SIZE + dim[None, :], weighted, mask=real)
    tl.store(to + GROUP * SIZE + head, peak, mask=head < GROUP)
    tl.store(to + GROUP * SIZE + GROUP + head, total, mask=head < GROUP)


@triton.jit
def join(
    out,
    partial,
    first_share,
    parts,
    sinks,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    DIMS: tl.constexpr,
    JOINED: tl.constexpr,
):
    """The output of a row for one key head from its parts, in their order (FlashAttention, arXiv 2205.14135, 3.1).

    first_share: where the first part's lies; the others follow KV_HEADS apart.
    """
    PITCH: tl.constexpr = GROUP * (SIZE + 2)
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    real = (head < GROUP)[:, None] & (dim < SIZE)[None, :]
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, DIMS], tl.float32)
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        there = partial + (first_share + part * KV_HEADS).to(tl.int64) * PITCH
        ends = there[:, None] + GROUP * SIZE + head[None, :]
        mask = (part < parts)[:, None] & (head < GROUP)[None, :]
        # Other processors wrote them: not from this one's own cache.
        peaks = tl.load(ends, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(ends + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            there[:, None, None] + head[None, :, None] * SIZE + dim[None, None, :],
            mask=(part < parts)[:, None, None] & real[None, :, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = finite(higher)
        weights = tl.exp2(peaks - base[None, :])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(totals * weights, 0)
        weighted = weighted * decay[:, None] + tl.sum(sums * weights[:, :, None], 0)
        peak = higher
    if SINKS:
        own_sinks = tl.load(sinks + kv_head * GROUP + head, mask=head < GROUP, other=float("-inf"))
        peak, total, weighted = sink(peak, total, weighted, own_sinks)
    result = weighted / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + head[:, None] * SIZE + dim[None, :], result.to(out.dtype.element_ty), mask=real)
