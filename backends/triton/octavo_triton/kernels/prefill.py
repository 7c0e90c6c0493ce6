"""Rows of any number of query tokens: causal attention over the paged cache, for a tile of tokens of one row."""

import triton
import triton.language as tl

from octavo_triton.kernels.common import absorb, begin, sink


@triton.jit(do_not_specialize=["first_row", "rows", "room", "tokens"])
def cut(
    tiles, query_starts, first_row, rows, room, tokens, ROWS: tl.constexpr, ITEMS: tl.constexpr, EARLY: tl.constexpr
):
    """Who does what: tiles [2, room] int32 of row (-1: nothing) and number of its tile of `tokens` query tokens.

    Rows before `first_row` are left out. A row's last tile comes first: it sees the most keys.
    """
    begin(EARLY)
    row = tl.arange(0, ROWS)
    counted = (row < rows) & (row >= first_row)
    start = tl.load(query_starts + row, mask=counted, other=0)
    new = tl.load(query_starts + row + 1, mask=counted, other=0) - start
    count = tl.cdiv(new, tokens)
    ends = tl.cumsum(count, 0)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), 1)
    left = tl.sum(tl.where(owner[:, None] == row[None, :], ends[None, :], 0), 1) - item - 1
    tl.store(tiles + item, tl.where(owner < rows, owner, -1), mask=item < room)
    tl.store(tiles + room + item, left, mask=item < room)


@triton.jit(do_not_specialize=["width", "room"])
def prefill(
    out,
    query,
    keys,
    values,
    table,
    query_starts,
    contexts,
    tiles,
    sinks,
    query_token,
    query_head,
    width,
    room,
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
    QUERIES: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    INVARIANT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of query tokens of one row, with all query heads of one key head. Grid: tiles times key heads.

    out [tokens, heads, size], contiguous. QUERIES: the tile's rows, a power of two: each is one token and one head.
    INVARIANT: a token's bits do not depend on which others are in its tile.
    """
    TOKENS: tl.constexpr = QUERIES // GROUP
    begin(EARLY)
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    row = tl.load(tiles + tile)
    if row < 0:
        return
    number = tl.load(tiles + room + tile)
    start = tl.load(query_starts + row)
    new = tl.load(query_starts + row + 1) - start
    context = tl.load(contexts + row)
    line = tl.arange(0, QUERIES)
    token = number * TOKENS + line // GROUP
    head = kv_head * GROUP + line % GROUP
    dim = tl.arange(0, DIMS)
    live = (line < TOKENS * GROUP) & (token < new)
    real = live[:, None] & (dim < SIZE)[None, :]
    at_token = (start + token).to(tl.int64)
    own = tl.load(
        query + (at_token * query_token + head.to(tl.int64) * query_head)[:, None] + dim[None, :], mask=real, other=0.0
    )
    table += row.to(tl.int64) * width
    before = context - new
    positions = before + token
    earliest = before + number * TOKENS
    end = tl.minimum(earliest + TOKENS, context)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, DIMS], tl.float32)
    oldest = 0
    if WINDOW is not None:
        oldest = tl.maximum(earliest - WINDOW + 1, 0) // TILE
    # All rows of the tile see all keys before, but for a window, which is looked at in any case. How many that are
    # depends on the tile, and a compiler may round differently in two loops: so INVARIANT takes one alone. What a
    # row does not see leaves it as it was, to the bit: weights of 0, and a decay of 1 or nothing that could decay.
    seen = oldest if INVARIANT else tl.maximum((earliest + 1) // TILE, oldest)
    for key_tile in tl.range(oldest, seen, num_stages=STAGES):
        peak, total, weighted = absorb(
            peak, total, weighted, own, keys, values, table, key_tile, end, positions, scale, kv_head,
            KEY, VALUE, SIZE, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, False, False,
        )  # fmt: skip
    for key_tile in tl.range(seen, tl.cdiv(end, TILE), num_stages=STAGES):
        peak, total, weighted = absorb(
            peak, total, weighted, own, keys, values, table, key_tile, end, positions, scale, kv_head,
            KEY, VALUE, SIZE, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, True, True,
        )  # fmt: skip
    if SINKS:
        kv_sinks = tl.load(sinks + head, mask=live, other=float("-inf"))
        peak, total, weighted = sink(peak, total, weighted, kv_sinks)
    result = weighted / tl.maximum(total, 1e-30)[:, None]
    to = out + (at_token * (KV_HEADS * GROUP) + head)[:, None] * SIZE + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=real)
