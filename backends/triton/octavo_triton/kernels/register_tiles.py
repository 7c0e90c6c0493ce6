"""Tiles of keys and values in Gluon, loaded from memory straight into the registers that the matrix unit reads.

A tile has TOKENS tokens for each of WARPS warps, each of which has a running softmax of its own. A warp's lanes load
whole lines of memory; where the matrix unit wants another lane to have an element, lanes exchange them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

TOKENS = gl.constexpr(16)
"""Of a warp: what the matrix unit takes at a time."""
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def matrix(warps):
    """Of scores [warps, tokens, heads] and of sums [warps, dims, heads].

    There are 8 heads at least; the other way round, [heads, tokens], there would be 16.
    """
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def key_operand(warps):
    """A thread has dims side by side: in a product it does not matter which, if queries are held alike."""
    return gl.DotOperandLayout(0, matrix(warps), 8)


@gluon.constexpr_function
def query_operand(warps):
    """Of queries [warps, dims, heads]."""
    return gl.DotOperandLayout(1, matrix(warps), 8)


@gluon.constexpr_function
def value_operand(warps, upright):
    """Of values [warps, dims, tokens]."""
    return gl.DotOperandLayout(0, matrix(warps), 4 if upright else 2)


@gluon.constexpr_function
def weight_operand(warps, upright):
    """Of weights [warps, tokens, heads]."""
    return gl.DotOperandLayout(1, matrix(warps), 4 if upright else 2)


@gluon.constexpr_function
def _linear(warps, shape, registers, lanes):
    """Bases of a thread's elements and of a warp's lanes, each warp with an entry of the first axis."""
    held = [[bit, 0, 0] for bit in (1, 2) if bit < warps]
    return gl.DistributedLinearLayout(registers, lanes, held, [], [warps, *shape])


@gluon.constexpr_function
def loaded_keys(warps, size, upright):
    """[warps, tokens, size] as they are loaded. upright: dims lie in runs of 8, and a run of all slots together."""
    eight = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    if upright:
        lanes = [[0, 0, 8], [0, 8, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
        return _linear(warps, [16, size], eight + [[0, 0, bit] for bit in (16, 32, 64) if bit < size], lanes)
    if size == 64:
        lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 2, 0], [0, 4, 0]]
        return _linear(warps, [16, size], [*eight, [0, 8, 0], [0, 1, 0]], lanes)
    lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 4, 0]]
    return _linear(warps, [16, size], [*eight, [0, 8, 0], [0, 1, 0], [0, 2, 0]], lanes)


@gluon.constexpr_function
def loaded_values(warps, size, upright):
    """[warps, tokens, size] as they are loaded; upright [warps, size, tokens]: a dim's slots lie side by side."""
    if upright:
        lanes = [[0, 8, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
        registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, bit, 0] for bit in (16, 32, 64) if bit < size]
        return _linear(warps, [size, 16], registers, lanes)
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 8, 0]]
    return _linear(warps, [16, size], registers + [[0, 0, bit] for bit in (64,) if bit < size], lanes)


@gluon.jit
def dim_at(place, UPRIGHT: gl.constexpr):
    """Which dim stands where in a sum: see `_stood_up`."""
    return place if UPRIGHT else place // 64 * 64 + place % 8 * 8 + place // 8 % 8


@gluon.jit
def index(SIZE: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """0, 1, ... along one of a layout's three axes."""
    if AXIS == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif AXIS == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.jit
def _along(at, OUTER: gl.constexpr, PACKED: gl.constexpr, INNER: gl.constexpr):
    """As `common.along`."""
    if PACKED == 0:
        return at * INNER
    else:
        return at // PACKED * OUTER + at % PACKED * INNER


@gluon.jit
def blocks_of(
    table, first, last, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr
):
    """Of the tokens from `first` on; one for each warp where a block holds its tokens; behind the last that one's."""
    token = first + index(WARPS, 0, layout) * TOKENS
    if BLOCK_SIZE % TOKENS != 0:
        token = token + index(TOKENS, AXIS, layout)
    return gl.load(table + gl.minimum(token, last) // BLOCK_SIZE)


@gluon.jit
def load_keys(
    keys, blocks, first, last, kv_head,
    KEY: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr,
    EVICT: gl.constexpr,
):  # fmt: skip
    """[WARPS, TOKENS, SIZE]; behind the last token that one again, since an unused slot may hold NaN."""
    layout: gl.constexpr = loaded_keys(WARPS, SIZE, UPRIGHT)
    slot = gl.minimum(first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, 1, layout), last) % BLOCK_SIZE
    at = blocks.to(gl.int64) * KEY[0] + _along(slot, KEY[1], KEY[2], KEY[3]) + _along(kv_head, KEY[4], KEY[5], KEY[6])
    return gl.load(keys + at + _along(index(SIZE, 2, layout), KEY[7], KEY[8], KEY[9]), eviction_policy=EVICT)


@gluon.jit
def load_values(
    values, blocks, first, last, kv_head,
    VALUE: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr,
    EVICT: gl.constexpr,
):  # fmt: skip
    """As `load_keys`; upright [WARPS, SIZE, TOKENS], with whatever unused slots hold."""
    layout: gl.constexpr = loaded_values(WARPS, SIZE, UPRIGHT)
    head = _along(kv_head, VALUE[4], VALUE[5], VALUE[6])
    if UPRIGHT:
        slot = (first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, 2, layout)) % BLOCK_SIZE
        at = blocks.to(gl.int64) * VALUE[0] + slot + head
        return gl.load(values + at + index(SIZE, 1, layout) * VALUE[9], eviction_policy=EVICT)
    else:
        slot = gl.minimum(first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, 1, layout), last) % BLOCK_SIZE
        at = blocks.to(gl.int64) * VALUE[0] + _along(slot, VALUE[1], VALUE[2], VALUE[3]) + head
        dim = _along(index(SIZE, 2, layout), VALUE[7], VALUE[8], VALUE[9])
        return gl.load(values + at + dim, eviction_policy=EVICT)


@gluon.jit
def _kept(value, mask):
    """Elements where all bits of the mask are set, 0 where none is, also in the place of NaN; two at a time."""
    mask, value = gl.broadcast(mask, value)
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [value, mask], dtype=value.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _stood_up(lying, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Token-major values as an operand [WARPS, SIZE, TOKENS]; in its order of dims no lane needs another's."""
    apart = gl.reshape(lying, [WARPS, TOKENS, SIZE // 64, 8, 8])
    turned = gl.permute(apart, [0, 2, 4, 3, 1])
    return gl.convert_layout(
        gl.reshape(turned, [WARPS, SIZE, TOKENS]), value_operand(WARPS, False), assert_trivial=True
    )


@gluon.jit
def _widened(element, DTYPE: gl.constexpr):
    """In the queries' dtype. From float8 to bfloat16 by way of others: each step has an instruction that is fast."""
    if element.dtype == DTYPE:
        return element
    elif gl.bfloat16 == DTYPE:
        return element.to(gl.float16).to(gl.float32).to(DTYPE)
    else:
        return element.to(DTYPE)


@gluon.jit
def absorb(
    peak, total, weighted, query, key, value, first, end, oldest, scale,
    SIZE: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """A tile into the running softmax of each warp.

    peak [WARPS, HEADS], in base 2, total [WARPS, TOKENS, HEADS], whose tokens are to be summed at the end, and weighted
    [WARPS, SIZE, HEADS] come back renewed. oldest: the first token that is seen, where there is a WINDOW.
    """
    layout: gl.constexpr = matrix(WARPS)
    nothing = gl.zeros([WARPS, TOKENS, HEADS], gl.float32, layout)
    scores = mma_v2(gl.convert_layout(_widened(key, query.dtype), key_operand(WARPS)), query, nothing)
    value = _widened(value, query.dtype)
    base_2 = scale * LOG2_E
    if SOFTCAP is not None:
        scores = SOFTCAP - 2 * SOFTCAP / (gl.exp(scores * (2 * scale / SOFTCAP)) + 1)
        base_2 = LOG2_E
    token = first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, 1, layout)
    seen = token < end
    if WINDOW is not None:
        seen = seen & (token >= oldest)
    scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * base_2)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * base_2 - gl.expand_dims(base, 1))
    decay = gl.expand_dims(gl.exp2(peak - base), 1)
    if UPRIGHT:
        operand: gl.constexpr = value_operand(WARPS, True)
        place = first + index(WARPS, 0, operand) * TOKENS + index(TOKENS, 2, operand)
        value = _kept(gl.convert_layout(value, operand), gl.where(place < end, -1, 0).to(gl.int16))
    else:
        value = _stood_up(value, SIZE, WARPS)
    given = gl.convert_layout(weights.to(value.dtype), weight_operand(WARPS, UPRIGHT))
    return higher, total * decay + weights, mma_v2(value, given, weighted * decay)
