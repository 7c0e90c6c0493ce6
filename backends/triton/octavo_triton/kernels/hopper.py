"""Prompts on Hopper, in Gluon: one warp group fetches tiles of keys and values, two others multiply (FlashAttention-3).

As arXiv 2407.08608 has it (sections 3.1 and 3.2): the matrix unit works on the next tile's scores and on the last
tile's values while a warp group computes the weights of this tile; and there are two such groups, so that one
multiplies while the other does not.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    raise ImportError("from Triton 3.9 on tiles are fetched by another function")

_LOG2_E = gl.constexpr(1.4426950408889634)
_ROWS = gl.constexpr(64)
"""Of a warp group: what the matrix unit takes at a time."""
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name up to Triton 3.6, and since
QUERIES = 2 * 64
"""Rows of a tile, tokens times the query heads of a key head: of both groups."""


@gluon.jit
def _fetch(
    keys,
    values,
    key_tiles,
    value_tiles,
    key_ready,
    key_free,
    value_ready,
    value_free,
    table,
    kv_head,
    oldest,
    end,
    BLOCK_SIZE: gl.constexpr,
    SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles `end` - 1 down to `oldest`, into the next place that both groups are done with."""
    BYTES: gl.constexpr = TILE * SIZE * 2
    for number in range(end - oldest):
        first = (end - 1 - number) * TILE
        at = gl.load(table + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
        place = number % STAGES
        # A place that was never used counts as let go.
        turn = number // STAGES & 1 ^ 1
        mbarrier.wait(key_free.index(place), turn)
        mbarrier.expect(key_ready.index(place), BYTES)
        tma.async_copy_global_to_shared(keys, [at, kv_head * SIZE], key_ready.index(place), key_tiles.index(place))
        mbarrier.wait(value_free.index(place), turn)
        mbarrier.expect(value_ready.index(place), BYTES)
        tma.async_copy_global_to_shared(
            values, [at, kv_head * SIZE], value_ready.index(place), value_tiles.index(place)
        )


@gluon.jit
def _masked(scores, number, positions, end, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of tile `number`, -inf where a row that stands at its position sees no such key."""
    tokens = number * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
    tokens, positions = gl.expand_dims(tokens, 0), gl.expand_dims(positions, 1)
    seen = (tokens <= positions) & (tokens < end)
    if WINDOW is not None:
        seen = seen & (tokens > positions - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _weigh(scores, peak, total, scale, SOFTCAP: gl.constexpr):
    """A tile of scores -> weights, and how much what came before counts now; peak (in base 2) and total renewed."""
    base_2 = scale * _LOG2_E
    if SOFTCAP is not None:
        # Of what is masked, too, the cap of -inf would be a number.
        cap = SOFTCAP - 2 * SOFTCAP / (gl.exp(scores * (2 * scale / SOFTCAP)) + 1)
        scores = gl.where(scores == float("-inf"), scores, cap)
        base_2 = _LOG2_E
    higher = gl.maximum(peak, gl.max(scores, 1) * base_2)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * base_2 - gl.expand_dims(base, 1))
    decay = gl.exp2(peak - base)
    return weights, decay, higher, total * decay + gl.sum(weights, 1)


@gluon.jit
def _zero_unused(tile, number, end, TILE: gl.constexpr):
    """Values of keys that are none become 0: an unused slot may hold NaN, which a weight of 0 would not make 0.

    Both groups do it, and write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    inside = number * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)) < end
    tile.store(gl.where(gl.expand_dims(inside, 1), tile.load(LAYOUT), 0.0))
    fence_async_shared()
    _barrier()


@gluon.jit
def _attend(
    out,
    query,
    sinks,
    own_queries,
    key_tiles,
    value_tiles,
    key_ready,
    key_free,
    value_ready,
    value_free,
    kv_head,
    start,
    first_token,
    new,
    before,
    end,
    oldest,
    query_token,
    query_head,
    scale,
    HALF: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    TOKENS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp group: _ROWS rows of the tile, from the last tile of keys that one of them sees to the first."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line = HALF * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LOADED))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LOADED))
    token = first_token + line // GROUP
    live = (line < TOKENS * GROUP) & (token < new)
    at = (start + token).to(gl.int64) * query_token + (kv_head * GROUP + line % GROUP).to(gl.int64) * query_head
    loaded = gl.load(query + gl.expand_dims(at, 1) + gl.expand_dims(dim, 0), mask=gl.expand_dims(live, 1), other=0.0)
    own = own_queries.index(HALF)
    own.store(loaded)
    fence_async_shared()
    _barrier()

    row = HALF * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    positions = before + first_token + row // GROUP
    peak = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([_ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.full([_ROWS, TILE], 0.0, gl.float32, SCORES)
    weighted = gl.full([_ROWS, SIZE], 0.0, gl.float32, SUMS)
    last = gl.cdiv(end, TILE) - 1
    mbarrier.wait(key_ready.index(0), 0)
    scores = warpgroup_mma(own, key_tiles.index(0).permute((1, 0)), nothing, use_acc=False)
    _barrier()
    mbarrier.arrive(key_free.index(0))
    scores = _masked(scores, last, positions, end, TILE, WINDOW)
    weights, decay, peak, total = _weigh(scores, peak, total, scale, SOFTCAP)
    mbarrier.wait(value_ready.index(0), 0)
    if (last + 1) * TILE > end:
        _zero_unused(value_tiles.index(0), last, end, TILE)
    # All rows see all keys of the tiles between these two numbers.
    whole = (before + first_token + 1) // TILE
    behind = 0
    if WINDOW is not None:
        behind = gl.maximum(before + first_token + TOKENS - WINDOW + TILE - 1, 0) // TILE
    for number in range(1, last + 1 - oldest):
        place, last_place, turn = number % STAGES, (number - 1) % STAGES, number // STAGES & 1
        mbarrier.wait(key_ready.index(place), turn)
        next_scores = warpgroup_mma(own, key_tiles.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
        weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
        next_weighted = warpgroup_mma(weights, value_tiles.index(last_place), weighted, is_async=True)
        scores = warpgroup_mma_wait(1, (next_scores,))
        _barrier()  # all warps are done with the tile, before the one thread that says so
        mbarrier.arrive(key_free.index(place))
        if (last - number >= whole) | (last - number < behind):
            scores = _masked(scores, last - number, positions, end, TILE, WINDOW)
        weights, decay, peak, total = _weigh(scores, peak, total, scale, SOFTCAP)
        weighted = warpgroup_mma_wait(0, (next_weighted,))
        _barrier()
        mbarrier.arrive(value_free.index(last_place))
        mbarrier.wait(value_ready.index(place), turn)
        weighted = weighted * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
    weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
    weighted = warpgroup_mma(weights, value_tiles.index((last - oldest) % STAGES), weighted)

    if SINKS:
        # A logit of each row joins its softmax and carries no value (arXiv 2309.17453, section 3).
        own_sinks = gl.load(sinks + kv_head * GROUP + row % GROUP) * _LOG2_E
        higher = gl.maximum(peak, own_sinks)
        decay = gl.exp2(peak - higher)
        total = total * decay + gl.exp2(own_sinks - higher)
        weighted = weighted * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
    total = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, SUMS))
    line = HALF * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, SIZE, layout=gl.SliceLayout(0, SUMS))
    token = first_token + line // GROUP
    to = ((start + token).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + line % GROUP) * SIZE
    gl.store(
        out + gl.expand_dims(to, 1) + gl.expand_dims(dim, 0),
        (weighted / gl.expand_dims(total, 1)).to(DTYPE),
        mask=gl.expand_dims((line < TOKENS * GROUP) & (token < new), 1),
    )


@gluon.jit
def _places(count: gl.constexpr, users: gl.constexpr):
    """Barriers of `count` places, on which so many arrive."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(count):
        mbarrier.init(barriers.index(place), count=users)
    return barriers


@gluon.jit(do_not_specialize=["width", "room"])
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
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As kernels.prefill, for tiles of QUERIES rows; two bytes an element, of which a block holds a multiple of TILE.

    keys, values: descriptors of [blocks * slots, KV_HEADS * SIZE], of which a tile is [TILE, SIZE].
    """
    TOKENS: gl.constexpr = 2 * _ROWS // GROUP
    DTYPE: gl.constexpr = query.dtype.element_ty
    kv_head = gl.program_id(0) % KV_HEADS
    tile = gl.program_id(0) // KV_HEADS
    row = gl.load(tiles + tile)
    if row >= 0:
        first_token = gl.load(tiles + room + tile) * TOKENS
        start = gl.load(query_starts + row)
        new = gl.load(query_starts + row + 1) - start
        before = gl.load(contexts + row) - new
        end = before + gl.minimum(first_token + TOKENS, new)
        oldest = 0
        if WINDOW is not None:
            oldest = gl.maximum(before + first_token - WINDOW + 1, 0) // TILE
        own_queries = gl.allocate_shared_memory(DTYPE, [2, _ROWS, SIZE], gl.NVMMASharedLayout(128, 16, 2))
        key_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, SIZE], keys.layout)
        value_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, SIZE], values.layout)
        key_ready, value_ready = _places(STAGES, 1), _places(STAGES, 1)
        key_free, value_free = _places(STAGES, 2), _places(STAGES, 2)
        fence_async_shared()
        table += row.to(gl.int64) * width
        # fmt: off
        gl.warp_specialize([
            (_attend, (
                out, query, sinks, own_queries, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
                kv_head, start, first_token, new, before, end, oldest, query_token, query_head, scale,
                0, KV_HEADS, GROUP, SIZE, WINDOW, SOFTCAP, SINKS, TOKENS, TILE, STAGES,
            )),
            (_attend, (
                out, query, sinks, own_queries, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
                kv_head, start, first_token, new, before, end, oldest, query_token, query_head, scale,
                1, KV_HEADS, GROUP, SIZE, WINDOW, SOFTCAP, SINKS, TOKENS, TILE, STAGES,
            )),
            (_fetch, (
                keys, values, key_tiles, value_tiles, key_ready, key_free, value_ready, value_free,
                table, kv_head, oldest, gl.cdiv(end, TILE), BLOCK_SIZE, SIZE, TILE, STAGES,
            )),
        ], [4, 4], [240, 24])
        # fmt: on
