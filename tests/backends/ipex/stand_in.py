"""The library's operators, in float64: what ends a process or gives wrong numbers there is an error here.

Each demand was found by experiment with 2.8.0 on CPUs: it is what the library needs and does not look at.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FP8 = torch.float8_e5m2
PARTITION = 128
"""Tokens that the kernel for single queries takes at once: blocks must divide it."""


class Harm(AssertionError):
    """The library would end the process, or err and say nothing."""


def demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Harm(otherwise)


def reshape_and_cache(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, word: str, k_scale: float, v_scale: float
) -> tuple[Tensor, Tensor]:
    check_cache(keys, values, word)
    size = keys.shape[2]
    demand(slots.dtype == torch.int32 and slots.is_contiguous(), "slots are int32")
    demand(len(slots) >= len(key) == len(value), "tokens without a slot are read from behind the slots")
    demand(int(slots.min()) >= 0, "a slot of -1 is written before the buffer, and into other heads")
    demand(int(slots.max()) < len(keys) * size, "a slot behind the cache is written there")
    for new, held in ((key, keys), (value, values)):
        demand(new.stride(-1) == 1, "the last axis is read as if it had no gaps")
        if new.dtype != held.dtype and not (held.dtype == FP8 and new.dtype in (torch.float32, torch.bfloat16)):
            raise RuntimeError("dtypes")
        for token, slot in zip(new, slots.tolist(), strict=True):
            held[slot // size, :, slot % size] = token.to(held.dtype)
    return keys, values


def single_query_cached_kv_attention(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, head_mapping: Tensor, scale: float, table: Tensor,
    contexts: Tensor, block_size: int, longest: int, slopes: Tensor | None, window: int, k_scale: float,
    v_scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    demand(keys.shape[2] == block_size, "another block size is read out of range")
    demand(PARTITION % block_size == 0, "a block that does not divide 128 breaks the heap")
    demand(longest >= int(contexts.max()), "what is behind the longest context is not read")
    rows = len(contexts)
    shared = next((row for row in range(rows) if table[row, 0] != table[0, 0]), rows)
    if window < 0 and shared >= 4 and query.shape[1] * (rows // shared) > 2 * torch.get_num_threads():
        raise RuntimeError("Sliding window unsupported")
    if keys.dtype == FP8 and query.dtype != torch.bfloat16:
        raise RuntimeError("fp8")
    if window >= 0 and softcap != -1:
        raise RuntimeError("soft cap with a window")
    demand(window < 0 or window >= longest, "partitions that a window hides count with a logit of 0")
    if slopes is not None:
        demand(
            slopes.dtype == torch.float32 and slopes.shape == query.shape[1:2], "a float32 slope for each query head"
        )
    starts = torch.arange(rows + 1, dtype=torch.int32)
    attend(out, query, keys, values, starts, contexts, table, scale, None, softcap, word_of(keys), slopes)
    return out


def flash_attn_varlen_func(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, query_starts: Tensor, key_starts: Tensor,
    most_queries: int, longest: int, scale: float, causal: bool, table: Tensor, slopes: Tensor | None,
    left: int, right: int, word: str, k_scale: float, v_scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    if slopes is not None or (keys.dtype == FP8 and query.dtype == torch.float16):
        raise RuntimeError("not supported")
    demand(causal, "every answer is causal")
    demand(key_starts.dtype == torch.int32 and int(key_starts[0]) == 0, "sums of contexts are int32, from 0")
    demand(most_queries >= 1, "it divides by the most queries of a row")
    demand(most_queries >= int(query_starts.diff().max()), "rows with more queries are not written")
    demand(longest >= int(key_starts.diff().max()), "what is behind the longest context is read out of range")
    demand(left != 0, "a window of 0 tokens before the query is taken for none")
    demand((left > 0) == (right == 0) and right in (0, -1), "a window ends at the query")
    window = left + 1 if left > 0 else None
    attend(out, query, keys, values, query_starts, key_starts.diff().int(), table, scale, window, softcap, word)
    return out


def word_of(keys: Tensor) -> str:
    return "fp8_e5m2" if keys.dtype == FP8 else "auto"


def check_cache(keys: Tensor, values: Tensor, word: str) -> None:
    demand(keys.dim() == 4 and keys.shape == values.shape, "[blocks, kv_heads, block_size, head_size]")
    demand(keys.stride() == values.stride(), "values are read by the strides of keys")
    demand(keys.is_contiguous(), "a token lies right behind the one before it")
    demand(word == word_of(keys), "the cache's dtype by name")


def attend(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, contexts: Tensor, table: Tensor,
    scale: float, window: int | None, softcap: float, word: str, slopes: Tensor | None = None,
) -> None:  # fmt: skip
    check_cache(keys, values, word)
    demand(query.is_contiguous() and out.is_contiguous(), "tokens lie one behind the other")
    demand(out.shape == query.shape and out.dtype == query.dtype, "an output is like its query")
    demand(query.shape[1] % keys.shape[1] == 0, "heads that no key head is left for read out of range")
    demand(keys.dtype in (query.dtype, FP8), "dtypes")
    for integers in (starts, contexts, table):
        demand(integers.dtype == torch.int32 and integers.is_contiguous(), "int32, read without strides")
    demand(int(starts[-1]) == len(query), "rows are all of the query")
    demand(softcap == -1 or softcap > 0, "only -1 is no soft cap")
    demand(int(contexts.min()) > 0, "a row without keys comes out as NaN")
    size = keys.shape[2]
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        context = int(contexts[row])
        blocks = blocks_of(table[row], context, size, len(keys), end - start)
        held = [torch.cat([cache[block] for block in blocks], 1)[:, :context] for cache in (keys, values)]
        key, value = (one.transpose(0, 1) for one in held)
        out[start:end] = answer(query[start:end], key, value, scale, window, softcap, slopes).to(out.dtype)


def blocks_of(table: Tensor, context: int, size: int, room: int, queries: int) -> list[int]:
    """Those that hold a row's context, of which so many queries are the last."""
    demand(queries <= context, "a query that sees no key comes out as NaN")
    blocks: list[int] = table[: -(-context // size)].tolist()
    demand(len(blocks) * size >= context and min(blocks) >= 0, "the table holds the context")
    demand(max(blocks) < room, "a block behind the cache is read there")
    return blocks


def answer(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float,
    slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of the last queries [queries, heads, size], causal, to key and value [context, kv_heads, size]; float64."""
    queries, context, group = len(query), len(key), query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, dim=1) for one in (key, value))
    scores = scale * torch.einsum("qhd,khd->hqk", query.double(), key)
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    behind = torch.arange(context - queries, context)[:, None] - torch.arange(context)
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * behind
    seen = (behind >= 0) & (behind < (window or context))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
