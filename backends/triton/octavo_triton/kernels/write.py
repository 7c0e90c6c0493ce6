"""Keys and values into a cache of any layout."""

import triton
import triton.language as tl

from octavo_triton.kernels.common import along, begin


@triton.jit(do_not_specialize=["tokens"])
def write(
    keys,
    values,
    key,
    value,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    tokens,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """TOKENS tokens' heads, of `tokens`. Grid: so many at a time.

    key, value: [tokens, KV_HEADS, SIZE], the last stride is 1; a slot of -1 is left. KEY and VALUE: the stride of
    blocks, then three numbers for each axis (see `along`): slot, head and dim. ELEMENTS: a power of two that holds a
    token's. LARGEST: what the cache's dtype holds at most, where that is less than its input may be: values beyond
    become it.
    """
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    element = tl.arange(0, ELEMENTS)[None, :]
    mask = (slot >= 0) & (element < KV_HEADS * SIZE)
    head = element // SIZE
    dim = element % SIZE
    block = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE
    new_key = tl.load(key + token * key_token + head * key_head + dim, mask=mask)
    new_value = tl.load(value + token * value_token + head * value_head + dim, mask=mask)
    if LARGEST is not None:
        # NaN stays NaN.
        new_key = tl.clamp(new_key.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        new_value = tl.clamp(new_value.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    key_at = (
        block * KEY[0]
        + along(inside, KEY[1], KEY[2], KEY[3])
        + along(head, KEY[4], KEY[5], KEY[6])
        + along(dim, KEY[7], KEY[8], KEY[9])
    )
    value_at = (
        block * VALUE[0]
        + along(inside, VALUE[1], VALUE[2], VALUE[3])
        + along(head, VALUE[4], VALUE[5], VALUE[6])
        + along(dim, VALUE[7], VALUE[8], VALUE[9])
    )
    tl.store(keys + key_at, new_key.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + value_at, new_value.to(values.dtype.element_ty), mask=mask)
