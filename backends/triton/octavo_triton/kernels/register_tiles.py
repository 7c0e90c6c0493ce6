"""Tiles of keys and values in Gluon, loaded from memory straight into the registers that the matrix unit reads.

They are loaded as words of several elements: compilers keep those together in a register.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo_triton.kernels.register_layouts import (
    TOKENS,
    key_operand,
    loaded_keys,
    loaded_values,
    matrix,
    run,
    value_operand,
    weight_operand,
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def dim_at(place, UPRIGHT: gl.constexpr, RUN: gl.constexpr):
    """Which dim stands where in a sum: see `_stood_up`."""
    return place if UPRIGHT else place // (8 * RUN) * (8 * RUN) + place % 8 * RUN + place // 8 % RUN


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
def _places(
    blocks, first, STRIDES: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, COUNT: gl.constexpr,
    AXIS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of COUNT slots, or words of slots, for each warp along AXIS: where they begin, and how far behind each is.

    Where a block holds them all, the latter depends on nothing, so that it is worked out once, or even compiled in.
    """
    start = first + index(WARPS, 0, layout) * COUNT
    within = index(COUNT, AXIS, layout)
    at = blocks.to(gl.int64) * STRIDES[0]
    if BLOCK_SIZE % COUNT == 0 and STRIDES[2] == 0:
        begin = at + _along(gl.multiple_of(start % BLOCK_SIZE, [1, 1, COUNT]), STRIDES[1], STRIDES[2], STRIDES[3])
        return begin, _along(within.to(gl.int64), STRIDES[1], STRIDES[2], STRIDES[3])
    else:
        begin = at + _along((start + within) % BLOCK_SIZE, STRIDES[1], STRIDES[2], STRIDES[3])
        return begin, within.to(gl.int64) * 0


@gluon.jit
def load_keys(
    keys, blocks, first, kv_head,
    KEY: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr,
    PACKED: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """Words [WARPS, TOKENS, SIZE / PACKED], with whatever unused slots hold."""
    layout: gl.constexpr = loaded_keys(WARPS, SIZE, UPRIGHT, PACKED)
    begin, behind = _places(blocks, first, KEY, BLOCK_SIZE, WARPS, TOKENS, 1, layout)
    dim = _along(index(SIZE // PACKED, 2, layout).to(gl.int64), KEY[7], KEY[8], KEY[9])
    there = keys + (begin + _along(kv_head, KEY[4], KEY[5], KEY[6]))
    return gl.load(there + (behind + dim), eviction_policy=EVICT)


@gluon.jit
def load_values(
    values, blocks, first, kv_head,
    VALUE: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr,
    PACKED: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """As `load_keys`; upright [WARPS, SIZE, TOKENS / PACKED]."""
    layout: gl.constexpr = loaded_values(WARPS, SIZE, UPRIGHT, PACKED)
    if UPRIGHT:
        begin, behind = _places(
            blocks, first // PACKED, VALUE, BLOCK_SIZE // PACKED, WARPS, TOKENS // PACKED, 2, layout
        )
        dim = index(SIZE, 1, layout).to(gl.int64) * VALUE[9]
    else:
        begin, behind = _places(blocks, first, VALUE, BLOCK_SIZE, WARPS, TOKENS, 1, layout)
        dim = _along(index(SIZE // PACKED, 2, layout).to(gl.int64), VALUE[7], VALUE[8], VALUE[9])
    there = values + (begin + _along(kv_head, VALUE[4], VALUE[5], VALUE[6]))
    return gl.load(there + (behind + dim), eviction_policy=EVICT)


@gluon.constexpr_function
def _to_float16(float8):
    """Instructions for the four elements of a word; those of e5m2 are the upper halves of float16."""
    if float8 == "e5m2":
        low, high = "prmt.b32 low, $4, 0, 0x1404;", "prmt.b32 high, $4, 0, 0x3424;"
    else:
        low, high = "cvt.rn.f16x2.e4m3x2 low, first;", "cvt.rn.f16x2.e4m3x2 high, second;"
    return (
        "{ .reg .b16 first, second; .reg .b32 low, high; mov.b32 {first, second}, $4; "
        f"{low} {high} mov.b32 {{$0, $1}}, low; mov.b32 {{$2, $3}}, high; }}"
    )


@gluon.jit
def _unpacked(words, query, FLOAT8: gl.constexpr, layout: gl.constexpr):
    """Of words with two elements, or four of that float8, which become float16 as queries are: along the last axis."""
    dtype = query.dtype
    if FLOAT8 is None:
        two = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(dtype, dtype), is_pure=True, pack=1
        )
        wide = gl.reshape(gl.join(two[0], two[1]), [words.shape[0], words.shape[1], 2 * words.shape[2]])
    else:
        four = gl.inline_asm_elementwise(
            _to_float16(FLOAT8), "=h,=h,=h,=h,r", [words], dtype=(dtype, dtype, dtype, dtype), is_pure=True, pack=1
        )
        both = gl.join(gl.join(four[0], four[2]), gl.join(four[1], four[3]))
        wide = gl.reshape(both, [words.shape[0], words.shape[1], 4 * words.shape[2]])
    return gl.convert_layout(wide, layout, assert_trivial=True)


@gluon.jit
def _kept(value, first, end, WARPS: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """Elements of tokens before the end, 0 behind it, also in the place of NaN; two at a time."""
    token = first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, AXIS, layout)
    mask, value = gl.broadcast(gl.where(token < end, -1, 0).to(gl.int16), value)
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [value, mask], dtype=value.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _stood_up(lying, SIZE: gl.constexpr, RUN: gl.constexpr, WARPS: gl.constexpr):
    """Token-major values as an operand [WARPS, SIZE, TOKENS]; in its order of dims no lane needs another's."""
    apart = gl.reshape(lying, [WARPS, TOKENS, SIZE // (8 * RUN), 8, RUN])
    turned = gl.permute(apart, [0, 2, 4, 3, 1])
    return gl.convert_layout(
        gl.reshape(turned, [WARPS, SIZE, TOKENS]), value_operand(WARPS, False), assert_trivial=True
    )


@gluon.constexpr_function
def shift(dtype):
    """Binary places by which weights are larger than they are: float16 has not many for small ones.

    It has 16 for large ones: some are left for what a very large logit less its rounded peak may be more than 0.
    """
    return 12 if dtype == gl.float16 else 0


@gluon.jit
def fitted(query, DTYPE: gl.constexpr, WARPS: gl.constexpr):
    """Queries [WARPS, SIZE, HEADS] in DTYPE, and what their scores are to be multiplied by, [WARPS, HEADS].

    DTYPE is float16 where keys are of float8, which one instruction turns into that: then bfloat16 queries of a head
    are divided by a power of two, so that the largest is between 1 and 2.
    """
    around: gl.constexpr = gl.SliceLayout(1, matrix(WARPS))
    if query.dtype == DTYPE:
        return query, gl.full([WARPS, query.shape[2]], 1.0, gl.float32, around)
    else:
        wide = query.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(wide), 1), 1e-30)
        power = gl.exp2(gl.floor(gl.log2(largest)))
        return (wide / gl.expand_dims(power, 1)).to(DTYPE), gl.convert_layout(power, around)


@gluon.jit
def absorb(
    peak, total, weighted, query, key, value, first, end, oldest, scale,
    SIZE: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr, UPRIGHT: gl.constexpr, FLOAT8: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """A tile into the running softmax of each warp.

    peak [WARPS, HEADS], in base 2, total [WARPS, TOKENS, HEADS], whose tokens are to be summed at the end, and weighted
    [WARPS, SIZE, HEADS] come back renewed; the latter two are shifted. scale: [WARPS, HEADS]. oldest: the first token
    that is seen, where there is a WINDOW. BOUNDED: are there tokens behind the end?
    """
    layout: gl.constexpr = matrix(WARPS)
    nothing = gl.zeros([WARPS, TOKENS, HEADS], gl.float32, layout)
    PACKED: gl.constexpr = 2 if FLOAT8 is None else 4
    key = gl.convert_layout(key, key_operand(WARPS, SIZE, PACKED, True))
    scores = mma_v2(_unpacked(key, query, FLOAT8, key_operand(WARPS, SIZE, PACKED)), query, nothing)
    base_2 = scale * LOG2_E
    if SOFTCAP is not None:
        scores = SOFTCAP - 2 * SOFTCAP / (gl.exp(scores * gl.expand_dims(2 * scale / SOFTCAP, 1)) + 1)
        base_2 = gl.full([WARPS, HEADS], LOG2_E, gl.float32, gl.SliceLayout(1, layout))
    token = first + index(WARPS, 0, layout) * TOKENS + index(TOKENS, 1, layout)
    if BOUNDED:
        scores = gl.where(token < end, scores, float("-inf"))
    if WINDOW is not None:
        scores = gl.where(token >= oldest, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * base_2)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * gl.expand_dims(base_2, 1) - gl.expand_dims(base - shift(query.dtype), 1))
    decay = gl.expand_dims(gl.exp2(peak - base), 1)
    if UPRIGHT:
        operand: gl.constexpr = value_operand(WARPS, True)
        value = _unpacked(gl.convert_layout(value, value_operand(WARPS, True, PACKED)), query, FLOAT8, operand)
        if BOUNDED:
            value = _kept(value, first, end, WARPS, 2, operand)
    else:
        loaded: gl.constexpr = loaded_values(WARPS, SIZE, False, PACKED, False)
        value = _unpacked(value, query, FLOAT8, loaded)
        if BOUNDED:
            value = _kept(value, first, end, WARPS, 1, loaded)
        value = _stood_up(value, SIZE, run(SIZE, PACKED), WARPS)
    given = gl.convert_layout(weights.to(value.dtype), weight_operand(WARPS, UPRIGHT))
    return higher, total * decay + weights, mma_v2(value, given, weighted * decay)
