"""The operators of the library's build for Intel's GPUs, in float64: what its source refuses or errs on fails here.

Names, order and meaning of the arguments are those of its source at the tag v2.8.10+xpu (csrc/gpu/aten/operators/:
CacheOps.cpp, transformers/attention.cpp). Their schemas are inferred from C++ functions, so no argument has a name. It
has never been held against the library itself.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.backends.ipex.stand_in import answer, blocks_of, demand

FLOATS = (torch.float16, torch.bfloat16)
COMPILED = (64, 128, 256)
"""Head sizes."""


def check(holds: bool, otherwise: str) -> None:
    """What the source checks itself."""
    if not holds:
        raise RuntimeError(otherwise)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, word: str, k_scale: float, v_scale: float,
    /,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """keys, values: [blocks, block size, kv_heads, head size]."""
    check(keys.stride(0) == values.stride(0), "strides of blocks")
    demand(keys.dim() == values.dim() == 4, "[blocks, block size, kv_heads, head size]")
    demand(keys.shape[2:] == key.shape[1:], "heads and their sizes are those of new keys")
    for new, held in ((key, keys), (value, values)):
        for token, block, offset in written(new, held, slots, word, keys.shape[1]):
            held[block, offset] = token
    return keys, values


def reshape_and_cache(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, word: str, k_scale: float, v_scale: float,
    /,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """keys: [blocks, kv_heads, head size / x, block size, x], values: [blocks, kv_heads, head size, block size]."""
    demand(keys.dim() == 5, "the block size and x are the last two axes of keys")
    demand(keys.shape[4] == 1, "another x is not what the kernel for single queries reads")
    demand((*values.shape, 1) == keys.shape, "[blocks, kv_heads, head size, block size]")
    demand(keys.shape[1:3] == key.shape[1:], "heads and their sizes are those of new keys")
    for new, held in ((key, keys[..., 0]), (value, values)):
        for token, block, offset in written(new, held, slots, word, keys.shape[3]):
            held[block, :, :, offset] = token
    return keys, values


def written(new: Tensor, held: Tensor, slots: Tensor, word: str, size: int) -> list[tuple[Tensor, int, int]]:
    """Each token with its block and where it is in it; slots below 0 are passed over."""
    demand(word == "auto" and new.dtype == held.dtype, "what lies in the cache is taken for the keys' dtype")
    demand(held.is_contiguous(), "the cache is written as if it had no gaps")
    demand(new.stride(2) == 1 and new.stride(1) == new.shape[2], "a token is read as if its heads had no gaps")
    demand(slots.dtype in (torch.int32, torch.int64) and slots.is_contiguous(), "slots are read without strides")
    demand(0 < len(slots) == len(new), "as many tokens are read as there are slots")
    demand(int(slots.max()) < len(held) * size, "a slot behind the cache is written there")
    demand(held.numel() <= 2**31, "places are counted in 32 bits")
    return [(token, slot // size, slot % size) for token, slot in zip(new, slots.tolist(), strict=True) if slot >= 0]


def chunked_prefill(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, query_starts: Tensor, key_starts: Tensor,
    used: Tensor | None, table: Tensor, slopes: Tensor | None, most_queries: int, longest: int, dropout: float,
    scale: float, zero: bool, left: int, right: int, causal: bool, softmax: bool, generator: object, softcap: float, /,
) -> Tensor:  # fmt: skip
    """keys, values: [blocks, block size, kv_heads, head size]."""
    check_call(query, keys, values, out, query_starts, key_starts)
    check_flags(used, slopes, dropout, scale, zero, causal, softmax, generator)
    check(table.dtype == torch.int32 and table.is_contiguous(), "the table is int32, without gaps")
    check(len(table) == len(query_starts) - 1, "a row of the table for each of the batch")
    demand(keys.dim() == 4 and keys.shape[3] == query.shape[2], "[blocks, block size, kv_heads, head size]")
    demand(keys.shape[1] == 64, "blocks of other sizes go to other kernels")
    demand(most_queries >= int(query_starts.diff().max()), "rows with more queries are not written")
    demand(longest >= int(key_starts.diff().max()), "what is behind the longest context is not read")
    demand(left >= -1 and right in (-1, 0) and (left == -1) == (right == -1), "a window ends at the query")
    window = None if left in (-1, *range(longest, left + 1)) else left + 1
    for row, (start, end) in enumerate(pairwise(query_starts.tolist())):
        context = int(key_starts[row + 1] - key_starts[row])
        blocks = blocks_of(table[row], context, keys.shape[1], len(keys), end - start)
        key, value = (cache[blocks].flatten(0, 1)[:context] for cache in (keys, values))
        out[start:end] = answer(query[start:end], key, value, scale, window, softcap).to(out.dtype)
    return out


def varlen_fwd(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, query_starts: Tensor, key_starts: Tensor,
    used: Tensor | None, slopes: Tensor | None, most_queries: int, longest: int, dropout: float, scale: float,
    zero: bool, left: int, right: int, causal: bool, softmax: bool, generator: object, softcap: float, /,
) -> Tensor:  # fmt: skip
    """key, value: [tokens, kv_heads, head size]."""
    check_call(query, key, value, out, query_starts, key_starts)
    check_flags(used, slopes, dropout, scale, zero, causal, softmax, generator)
    demand(int(key_starts[-1]) == len(key) == len(value), "rows are all of the keys")
    demand(most_queries >= int(query_starts.diff().max()), "rows with more queries are not written")
    demand(longest >= int(key_starts.diff().max()), "what is behind the longest context is not read")
    demand(left == right == -1, "nobody asks for a window here")
    for asked, seen in zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        own, context = slice(*asked), slice(*seen)
        out[own] = answer(query[own], key[context], value[context], scale, None, softcap).to(out.dtype)
    return out


def paged_attention(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: Tensor, group: int,
    scale: float, block_size: int, longest: int, slopes: Tensor | None, softcap: float, /,
) -> Tensor:  # fmt: skip
    """keys, values: [blocks, kv_heads, head size, block size], keys perhaps with an axis of one behind."""
    check(block_size in (16, 32), "Unsupported block size")
    demand(slopes is None, "no slopes are asked for")
    demand(keys.shape[:4] == values.shape and values.dim() == 4, "[blocks, kv_heads, head size, block size]")
    demand(values.shape[2:] == (query.shape[2], block_size), "head sizes and block sizes agree")
    check_floats(query, keys, values, out)
    demand(query.shape[1] == group * keys.shape[1], "heads are told apart by how many share a key head")
    for integers in (table, contexts):
        demand(integers.dtype == torch.int32 and integers.is_contiguous(), "int32, read without strides")
    demand(len(query) == len(table) == len(contexts), "one query a row")
    demand(int(contexts.min()) > 0 and longest >= int(contexts.max()), "contexts of 1 to the longest")
    for row in range(len(query)):
        context = int(contexts[row])
        blocks = blocks_of(table[row], context, block_size, len(keys), 1)
        key, value = (cache.flatten(3)[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:context] for cache in (keys, values))
        out[row : row + 1] = answer(query[row : row + 1], key, value, scale, None, softcap).to(out.dtype)
    return out


def check_call(query: Tensor, key: Tensor, value: Tensor, out: Tensor, *starts: Tensor) -> None:
    for integers in starts:
        check(integers.dtype == torch.int32 and integers.is_contiguous(), "int32, without gaps")
        demand(int(integers[0]) == 0, "sums start at 0")
    check(len(starts[0]) == len(starts[1]), "as many rows of keys as of queries")
    demand(int(starts[0][-1]) == len(query), "rows are all of the query")
    check_floats(query, key, value, out)


def check_floats(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    check(query.dtype == key.dtype == value.dtype == out.dtype, "one dtype")
    check(all(one.is_contiguous() for one in (query, key, value, out)), "all without gaps")
    demand(query.dtype in FLOATS, "for another dtype nothing is written")
    demand(query.shape[2] in COMPILED and out.shape == query.shape, "no kernel is compiled for this size")


def check_flags(
    used: object,
    slopes: object,
    dropout: float,
    scale: float,
    zero: bool,
    causal: bool,
    softmax: bool,
    generator: object,
) -> None:
    check(used is None, "seqused_k is not supported")
    demand(slopes is None and generator is None, "neither slopes nor random numbers are asked for")
    demand(type(dropout) is float and dropout == 0, "nothing is dropped")
    demand(type(scale) is float, "the scale is a number")
    demand(causal is True and zero is False and softmax is False, "causal, and nothing else")
