"""Rows that decode, in Gluon, from tiles in registers: as `decode`, for a GPU of NVIDIA's and dtypes of two bytes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo_triton.kernels.decode import FIELDS
from octavo_triton.kernels.register_layouts import TOKENS, loaded_keys, loaded_values, matrix, query_operand, run
from octavo_triton.kernels.register_tiles import (
    LOG2_E,
    absorb,
    blocks_of,
    dim_at,
    fitted,
    index,
    load_keys,
    load_values,
    shift,
)

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name up to Triton 3.6, and since


@gluon.jit(do_not_specialize=["width"])
def decode(
    out, query, keys, values, table, contexts, items, partial, arrived, sinks, query_token, query_head, width, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, HEADS: gl.constexpr,
    UPRIGHT: gl.constexpr, FLOAT8: gl.constexpr, JOINED: gl.constexpr, EARLY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `decode.decode`. UPRIGHT: a block's slots lie side by side for each dim of its values.

    FLOAT8: "e4m3" or "e5m2" where keys and values are of that, and given as words of four; else None.
    """
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    kv_head = gl.program_id(0) % KV_HEADS
    item = gl.program_id(0) // KV_HEADS
    own_item = items + item * FIELDS
    row = gl.load(own_item)
    end = gl.load(own_item + 2)
    # Aligned, but in a part that is empty: so that the compiler knows it.
    TILE: gl.constexpr = WARPS * TOKENS
    first = gl.cdiv(gl.load(own_item + 1), TILE) * TILE
    part = gl.load(own_item + 3)
    parts = gl.load(own_item + 4)
    streamed = gl.load(own_item + 5)
    block = gl.load(own_item + 6)
    if row >= 0:
        oldest = 0
        if WINDOW is not None:
            oldest = gl.load(contexts + row) - WINDOW
        table += row.to(gl.int64) * width
        own = query + row.to(gl.int64) * query_token + kv_head.to(gl.int64) * GROUP * query_head
        PACKED: gl.constexpr = 2 if FLOAT8 is None else 4  # elements of a word: what compilers keep together
        RUN: gl.constexpr = run(SIZE, PACKED)
        raw = _queries(own, query_head, GROUP, SIZE, HEADS, WARPS, PACKED)
        queries, power = fitted(raw, raw.dtype if FLOAT8 is None else gl.float16, WARPS)
        scales = power * scale
        # Which loads they are is compiled in.
        if streamed != 0:
            peak, total, weighted = _attended(
                queries, keys, values, table, block, first, end, oldest, kv_head, scales, KEY, VALUE, SIZE, BLOCK_SIZE,
                HEADS, WARPS, UPRIGHT, FLOAT8, WINDOW, SOFTCAP, "evict_first",
            )  # fmt: skip
        else:
            peak, total, weighted = _attended(
                queries, keys, values, table, block, first, end, oldest, kv_head, scales, KEY, VALUE, SIZE, BLOCK_SIZE,
                HEADS, WARPS, UPRIGHT, FLOAT8, WINDOW, SOFTCAP, "",
            )  # fmt: skip
        to = out + (row.to(gl.int64) * KV_HEADS + kv_head) * GROUP * SIZE
        own_sinks = sinks + kv_head * GROUP if SINKS else sinks
        if parts == 1:
            _finish(to, peak, total, weighted, own_sinks, GROUP, SIZE, SINKS, UPRIGHT, RUN)
        else:
            PITCH: gl.constexpr = GROUP * (SIZE + 2)
            share = partial + (item * KV_HEADS + kv_head).to(gl.int64) * PITCH
            _give(share, peak, total, weighted, GROUP, SIZE, UPRIGHT, RUN)
            _barrier()  # all threads' stores, before the one that counts
            count = arrived + row * KV_HEADS + kv_head
            if gl.atomic_add(count, 1, sem="acq_rel") == parts - 1:
                shares = partial + ((item - part) * KV_HEADS + kv_head).to(gl.int64) * PITCH
                _join(to, shares, KV_HEADS * PITCH, parts, own_sinks, GROUP, SIZE, SINKS, JOINED, WARPS)
                gl.store(count, 0)


@gluon.jit
def _queries(
    query, query_head,
    GROUP: gl.constexpr, SIZE: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """[WARPS, SIZE, HEADS], the same for each warp."""
    layout: gl.constexpr = query_operand(WARPS, SIZE, PACKED)
    head = index(WARPS, 0, layout) * 0 + index(HEADS, 2, layout)
    return gl.load(query + (head * query_head + index(SIZE, 1, layout)), mask=head < GROUP, other=0.0)


@gluon.jit
def _fetched(
    keys, values, table, key_blocks, value_blocks, first, last, kv_head,
    KEY: gl.constexpr, VALUE: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr,
    UPRIGHT: gl.constexpr, PACKED: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """A tile whose blocks are known, and the blocks of the next.

    Behind the last tile that one again: it is at hand, and the next one is another part's.
    """
    TILE: gl.constexpr = WARPS * TOKENS
    following = first + TILE
    first = gl.minimum(first // TILE, last // TILE) * TILE
    key = load_keys(keys, key_blocks, first, kv_head, KEY, SIZE, BLOCK_SIZE, WARPS, UPRIGHT, PACKED, EVICT)
    value = load_values(values, value_blocks, first, kv_head, VALUE, SIZE, BLOCK_SIZE, WARPS, UPRIGHT, PACKED, EVICT)
    key_blocks = blocks_of(table, following, last, BLOCK_SIZE, WARPS, 1, loaded_keys(WARPS, SIZE, UPRIGHT, PACKED))
    value_blocks = blocks_of(
        table, following, last, BLOCK_SIZE, WARPS, 2 if UPRIGHT else 1, loaded_values(WARPS, SIZE, UPRIGHT, PACKED)
    )
    return key, value, key_blocks, value_blocks


@gluon.jit
def _attended(
    query, keys, values, table, block, first, end, oldest, kv_head, scale,
    KEY: gl.constexpr, VALUE: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    WARPS: gl.constexpr, UPRIGHT: gl.constexpr, FLOAT8: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVICT: gl.constexpr,
):  # fmt: skip
    """Tokens `first` to `end` of a row: peak [HEADS], total [HEADS] and weighted [SIZE, HEADS] of all warps."""
    layout: gl.constexpr = matrix(WARPS)
    TILE: gl.constexpr = WARPS * TOKENS
    PACKED: gl.constexpr = 2 if FLOAT8 is None else 4
    AHEAD: gl.constexpr = 1 if FLOAT8 is None else 2  # tiles, since they are half as large
    last = gl.maximum(end, 1) - 1  # a row of padding has none: something is loaded that is there
    peak = gl.full([WARPS, HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([WARPS, TOKENS, HEADS], gl.float32, layout)
    weighted = gl.zeros([WARPS, SIZE, HEADS], gl.float32, layout)
    if BLOCK_SIZE % TILE == 0:  # the first that is read is known
        key_blocks = gl.full([WARPS, 1, 1], block, gl.int32, loaded_keys(WARPS, SIZE, UPRIGHT, PACKED))
        value_blocks = gl.full([WARPS, 1, 1], block, gl.int32, loaded_values(WARPS, SIZE, UPRIGHT, PACKED))
    else:
        key_blocks = blocks_of(table, first, last, BLOCK_SIZE, WARPS, 1, loaded_keys(WARPS, SIZE, UPRIGHT, PACKED))
        value_blocks = blocks_of(
            table, first, last, BLOCK_SIZE, WARPS, 2 if UPRIGHT else 1, loaded_values(WARPS, SIZE, UPRIGHT, PACKED)
        )
    key, value, key_blocks, value_blocks = _fetched(
        keys, values, table, key_blocks, value_blocks, first, last, kv_head, KEY, VALUE, SIZE, BLOCK_SIZE, WARPS,
        UPRIGHT, PACKED, EVICT,
    )  # fmt: skip
    if AHEAD == 2:
        later_key, later_value, key_blocks, value_blocks = _fetched(
            keys, values, table, key_blocks, value_blocks, first + TILE, last, kv_head, KEY, VALUE, SIZE, BLOCK_SIZE,
            WARPS, UPRIGHT, PACKED, EVICT,
        )  # fmt: skip
    tokens = gl.maximum(end - first, 0)
    whole = tokens // (2 * TILE)
    for rest in gl.static_range(2):
        for pair in range(whole if rest else 0, gl.cdiv(tokens, 2 * TILE) if rest else whole):
            for half in gl.static_range(2):  # two at a time, and the assembler puts loads where they belong: early
                start = first + pair * (2 * TILE) + half * TILE
                next_key, next_value, key_blocks, value_blocks = _fetched(
                    keys, values, table, key_blocks, value_blocks, start + AHEAD * TILE, last, kv_head, KEY, VALUE,
                    SIZE, BLOCK_SIZE, WARPS, UPRIGHT, PACKED, EVICT,
                )  # fmt: skip
                peak, total, weighted = absorb(
                    peak, total, weighted, query, key, value, start, end, oldest, scale, SIZE, HEADS, WARPS, UPRIGHT,
                    FLOAT8, WINDOW, SOFTCAP, rest == 1,
                )  # fmt: skip
                if AHEAD == 2:
                    key, value, later_key, later_value = later_key, later_value, next_key, next_value
                else:
                    key, value = next_key, next_value
    top = gl.max(peak, 0)
    base = gl.where(top == float("-inf"), 0.0, top) + shift(query.dtype)
    decay = gl.exp2(peak - gl.expand_dims(base, 0))
    all_total = gl.sum(gl.sum(total, 1) * decay, 0)
    # What a thread is to sum, it has first.
    merged: gl.constexpr = gl.BlockedLayout([WARPS, 1, HEADS], [1, 32, 1], [1, WARPS, 1], [0, 2, 1])
    all_weighted = gl.sum(gl.convert_layout(weighted * gl.expand_dims(decay, 1), merged), 0)
    heads: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, merged))
    return gl.convert_layout(top, heads), gl.convert_layout(all_total, heads), all_weighted


@gluon.jit
def _with_sinks(peak, total, sinks, head, GROUP: gl.constexpr):
    """As `common.sink`: the total, and how much the sum counts now."""
    own = gl.load(sinks + head, mask=head < GROUP, other=float("-inf")) * LOG2_E
    higher = gl.maximum(peak, own)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    decay = gl.exp2(peak - base)
    return total * decay + gl.exp2(own - base), decay


@gluon.jit
def _finish(
    to,
    peak,
    total,
    weighted,
    sinks,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    SINKS: gl.constexpr,
    UPRIGHT: gl.constexpr,
    RUN: gl.constexpr,
):
    """The output of a row that has one part."""
    layout: gl.constexpr = weighted.type.layout
    head = gl.arange(0, peak.shape[0], gl.SliceLayout(0, layout))
    dim = dim_at(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, layout)), 1), UPRIGHT, RUN)
    if SINKS:
        total, decay = _with_sinks(peak, total, sinks, head, GROUP)
        weighted = weighted * gl.expand_dims(decay, 0)
    result = weighted / gl.expand_dims(gl.maximum(total, 1e-30), 0)
    column = gl.expand_dims(head, 0) + dim * 0
    gl.store(to + (column * SIZE + dim), result.to(to.dtype.element_ty), mask=column < GROUP)


@gluon.jit
def _give(
    share, peak, total, weighted, GROUP: gl.constexpr, SIZE: gl.constexpr, UPRIGHT: gl.constexpr, RUN: gl.constexpr
):
    """As `decode.give`."""
    layout: gl.constexpr = weighted.type.layout
    head = gl.arange(0, peak.shape[0], gl.SliceLayout(0, layout))
    dim = dim_at(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, layout)), 1), UPRIGHT, RUN)
    column = gl.expand_dims(head, 0) + dim * 0
    gl.store(share + (column * SIZE + dim), weighted, mask=column < GROUP)
    gl.store(share + GROUP * SIZE + head, peak, mask=head < GROUP)
    gl.store(share + GROUP * SIZE + GROUP + head, total, mask=head < GROUP)


@gluon.constexpr_function
def _joined(warps, heads, size):
    """Of parts' sums [parts, heads, size]: a thread has the same elements of all parts, a warp heads of its own."""
    lanes = min(32, size // 4)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.jit
def _join(
    to, shares, pitch, parts, sinks, GROUP: gl.constexpr, SIZE: gl.constexpr, SINKS: gl.constexpr, JOINED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """As `decode.join`; shares lie `pitch` apart."""
    HEADS: gl.constexpr = _power_of_2(GROUP)
    layout: gl.constexpr = _joined(WARPS, HEADS, SIZE)
    ends: gl.constexpr = gl.SliceLayout(2, layout)
    sums: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    head = gl.arange(0, HEADS, gl.SliceLayout(0, ends))
    row = gl.expand_dims(gl.arange(0, HEADS, rows), 1)
    dim = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, sums)), 0)
    real = (row + dim * 0) < GROUP
    peak = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, ends))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, ends))
    weighted = gl.zeros([HEADS, SIZE], gl.float32, sums)
    for start in range(0, parts, JOINED):
        part = gl.expand_dims(start + gl.arange(0, JOINED, gl.SliceLayout(1, ends)), 1)
        mask = (part < parts) & (gl.expand_dims(head, 0) < GROUP)
        # Other processors wrote them: not from this one's own cache.
        at = shares + GROUP * SIZE + (part * pitch + gl.expand_dims(head, 0))
        peaks = gl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(at + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        given = gl.load(
            shares + (gl.expand_dims(part * pitch, 2) + gl.expand_dims(row * SIZE + dim, 0)),
            mask=gl.expand_dims(mask, 2) & gl.expand_dims(real, 0), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = gl.maximum(peak, gl.max(peaks, 0))
        base = gl.where(higher == float("-inf"), 0.0, higher)
        weights = gl.exp2(peaks - gl.expand_dims(base, 0))
        decay = gl.exp2(peak - base)
        total = total * decay + gl.sum(totals * weights, 0)
        kept = weighted * gl.expand_dims(gl.convert_layout(decay, rows), 1)
        weighted = kept + gl.sum(given * gl.expand_dims(weights, 2), 0)
        peak = higher
    if SINKS:
        total, decay = _with_sinks(peak, total, sinks, head, GROUP)
        weighted = weighted * gl.expand_dims(gl.convert_layout(decay, rows), 1)
    result = weighted / gl.expand_dims(gl.convert_layout(gl.maximum(total, 1e-30), rows), 1)
    gl.store(to + (row * SIZE + dim), result.to(to.dtype.element_ty), mask=real)
