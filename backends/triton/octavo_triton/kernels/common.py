"""What the kernels share: where an element lies in a cache, and how scores become weights."""

import triton
import triton.language as tl
from triton.language.target_info import current_target

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for what was launched before, if this kernel may start while that still runs; then let the next one start.

    Every kernel waits before it lets the next one start: so all but the last one before it have ended by then.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.constexpr_function
def is_cdna():
    """Is it compiled for a GPU of AMD's with waves of 64 threads? Interpreted it is not."""
    target = current_target()
    return target is not None and target.backend == "hip" and target.warp_size == 64


@triton.jit
def settle(own):
    """Every thread's stores end before any thread goes on. own: a tensor that each thread holds a part of.

    A barrier alone does that but for AMD's CDNA, where it waits for the LDS: another thread's store may still be on
    its way to the cache that a release by one thread makes visible to all.
    """
    if is_cdna():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=v,0,~{memory}", [own], dtype=tl.float32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def along(at, OUTER: tl.constexpr, PACKED: tl.constexpr, INNER: tl.constexpr):
    """Elements from an axis's start to coordinate `at`, by the strides outside and inside of its packed part."""
    if PACKED == 0:
        return at * INNER
    else:
        return at // PACKED * OUTER + at % PACKED * INNER


@triton.jit
def capped(scores, scale, SOFTCAP: tl.constexpr):
    """`softcap * tanh(scale * scores / softcap)`, with exp alone, which every target of Triton's has."""
    return SOFTCAP - 2 * SOFTCAP / (tl.exp(scores * (2 * scale / SOFTCAP)) + 1)


@triton.jit
def finite(peak):
    """A row that has seen nothing has weights of 0, not NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def blocks_of(table, first, end, tokens, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of each of the `tokens` (first, first + 1, ...) below `end`, one for all where a block holds them."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + first // BLOCK_SIZE).to(tl.int64)
    else:
        # A mask for whole blocks, too, tells the compiler that neighbouring slots are of one block; AMD's forgets it
        # with the load, and is told again.
        entry = tokens // BLOCK_SIZE
        blocks = tl.load(table + entry, mask=entry * BLOCK_SIZE < end, other=0).to(tl.int64)
        RUN: tl.constexpr = min(BLOCK_SIZE & -BLOCK_SIZE, TILE)
        return tl.max_constancy(blocks, [RUN])


@triton.constexpr_function
def is_upright(strides, block_size):
    """Do a block's slots lie side by side for each dim, so that they are loaded together?"""
    return strides[8] == 0 and strides[3] == 1 and strides[9] > 1 and block_size & (block_size - 1) == 0


@triton.jit
def load_keys(
    keys,
    blocks,
    slots,
    inside,
    kv_head,
    KEY: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """[DIMS, TILE], 0 where `inside` [TILE] is not, if BOUNDED, and beyond SIZE."""
    at = blocks * KEY[0] + along(slots, KEY[1], KEY[2], KEY[3]) + along(kv_head, KEY[4], KEY[5], KEY[6])
    dim = tl.arange(0, DIMS)
    there = keys + at[None, :] + along(dim, KEY[7], KEY[8], KEY[9])[:, None]
    if BOUNDED:
        return tl.load(there, mask=inside[None, :] & (dim < SIZE)[:, None], other=0.0)
    elif DIMS == SIZE:
        return tl.load(there)
    else:
        return tl.load(there, mask=(dim < SIZE)[:, None], other=0.0)


@triton.jit
def load_values(
    values,
    blocks,
    slots,
    inside,
    kv_head,
    VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """[TILE, DIMS], 0 where `inside` [TILE] is not, if BOUNDED, and beyond SIZE."""
    at = blocks * VALUE[0] + along(slots, VALUE[1], VALUE[2], VALUE[3]) + along(kv_head, VALUE[4], VALUE[5], VALUE[6])
    dim = tl.arange(0, DIMS)
    there = values + at[:, None] + along(dim, VALUE[7], VALUE[8], VALUE[9])[None, :]
    if BOUNDED:
        return tl.load(there, mask=inside[:, None] & (dim < SIZE)[None, :], other=0.0)
    elif DIMS == SIZE:
        return tl.load(there)
    else:
        return tl.load(there, mask=(dim < SIZE)[None, :], other=0.0)


@triton.jit
def load_upright_values(
    values,
    blocks,
    slots,
    tokens,
    end,
    kv_head,
    VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """As load_values, where each dim is a run of a block's slots.

    A run is loaded whole or not at all: a bound inside of it would make of one load as many as it has slots. What is
    beyond `end` is made 0 afterwards, a detour through registers, so a tile that has no bound is better.
    """
    at = blocks * VALUE[0] + slots + along(kv_head, VALUE[4], VALUE[5], VALUE[6])
    dim = tl.arange(0, DIMS)
    there = values + at[:, None] + dim[None, :] * VALUE[9]
    if BOUNDED:
        RUN: tl.constexpr = min(BLOCK_SIZE, TILE)
        begun = tokens // RUN * RUN < end
        loaded = tl.load(there, mask=begun[:, None] & (dim < SIZE)[None, :], other=0.0)
        return tl.where((tokens < end)[:, None], loaded, 0.0)
    elif DIMS == SIZE:
        return tl.load(there)
    else:
        return tl.load(there, mask=(dim < SIZE)[None, :], other=0.0)


@triton.jit
def absorb(
    peak,
    total,
    weighted,
    query,
    keys,
    values,
    table,
    number,
    end,
    positions,
    scale,
    kv_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Tile `number` of a row's keys into the running softmax of rows that stand at `positions`.

    peak [rows], in base 2, total [rows] and the weighted sum of values [rows, size] come back renewed. KEY and VALUE:
    the stride of blocks, then three numbers for each axis (see `along`): slot, head and dim. CAUSAL: some row may not
    see some key. BOUNDED: some key of the tile may be no key of the context: an unused slot may hold NaN, which a
    weight of 0 would not make 0.
    """
    first = number * TILE  # written so, the compiler knows how it is aligned
    tokens = first + tl.arange(0, TILE)
    DIMS: tl.constexpr = query.shape[1]
    blocks = blocks_of(table, first, end, tokens, BLOCK_SIZE, TILE)
    slots = tokens % BLOCK_SIZE
    inside = tokens < end
    key = load_keys(keys, blocks, slots, inside, kv_head, KEY, SIZE, DIMS, TILE, BOUNDED)
    if is_upright(VALUE, BLOCK_SIZE):
        value = load_upright_values(
            values, blocks, slots, tokens, end, kv_head, VALUE, SIZE, BLOCK_SIZE, DIMS, TILE, BOUNDED
        )
    else:
        value = load_values(values, blocks, slots, inside, kv_head, VALUE, SIZE, DIMS, TILE, BOUNDED)
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
    if SOFTCAP is None:
        base_2 = scale * LOG2_E
    else:
        scores, base_2 = capped(scores, scale, SOFTCAP), LOG2_E
    if BOUNDED:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    if WINDOW is not None:
        scores = tl.where(tokens[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * base_2)
    base = finite(higher)
    weights = tl.exp2(scores * base_2 - base[:, None])  # one multiply-add, where scaled scores would take two steps
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(query.dtype), value.to(query.dtype), weighted * decay[:, None], input_precision="ieee")
    return higher, total, weighted


@triton.jit
def sink(peak, total, weighted, sinks):
    """A logit of each row joins its softmax and carries no value (arXiv 2309.17453, section 3). sinks: [rows]."""
    own = sinks * LOG2_E
    higher = tl.maximum(peak, own)
    base = finite(higher)
    decay = tl.exp2(peak - base)
    return higher, total * decay + tl.exp2(own - base), weighted * decay[:, None]
