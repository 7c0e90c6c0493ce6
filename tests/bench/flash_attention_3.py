"""FlashAttention-3 in both its builds, in plain PyTorch: their signatures, what they refuse, what they compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GET_SCHEDULER_METADATA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,
    int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q,
    Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size,
    int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right, bool has_softcap,
    int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"""
FWD = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""


def _schedule(
    max_query: int, max_keys: int, heads: tuple[int, int, int], dtype: torch.dtype, page: int, used: Tensor,
    starts: Tensor, causal: bool,
) -> Tensor:  # fmt: skip
    """All that a schedule depends on: of another call it would not do."""
    known = [max_query, max_keys, *heads, dtype.itemsize, page, int(causal)]
    return torch.tensor([*known, *used.tolist(), *starts.tolist()], dtype=torch.int32)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, used: Tensor, table: Tensor, scale: float, causal: bool
) -> Tensor:
    """Row by row over the pages of the table; each query sees the keys up to its own, the last token's being the last.

    query: [tokens, heads, head_size]; keys, values: [pages, page, kv_heads, head_size].
    """
    assert query.dtype == keys.dtype == values.dtype != torch.float32
    assert {starts.dtype, used.dtype, table.dtype} == {torch.int32}
    assert all(tensor.stride(-1) == 1 for tensor in (query, keys, values, table))
    out = torch.empty(query.shape, dtype=torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype)
    for row, count in enumerate(used.tolist()):
        own = slice(int(starts[row]), int(starts[row + 1]))
        held = (tensor[table[row].long()].flatten(0, 1)[:count].float() for tensor in (keys, values))
        q, k, v = (part.transpose(0, 1)[None] for part in (query[own].float(), *held))
        new = own.stop - own.start
        seen = torch.ones(new, count, dtype=torch.bool).tril(count - new) if causal else None
        answer = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        out[own] = answer[0].transpose(0, 1)
    return out


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None, *,
    cu_seqlens_q: Tensor, page_size: int, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Of the package."""
    assert batch_size == len(cache_seqlens)
    heads = (num_heads_q, num_heads_kv, headdim)
    return _schedule(max_seqlen_q, max_seqlen_k, heads, qkv_dtype, page_size, cache_seqlens, cu_seqlens_q, causal)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, *, cache_seqlens: Tensor,
    page_table: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool = False,
    scheduler_metadata: Tensor,
) -> Tensor:  # fmt: skip
    """Of the package, which takes all that a row of the table has room for as the most keys."""
    page = k_cache.shape[1]
    heads = (q.shape[1], k_cache.shape[2], q.shape[2])
    most = page_table.shape[1] * page
    schedule = _schedule(max_seqlen_q, most, heads, q.dtype, page, cache_seqlens, cu_seqlens_q, causal)
    assert torch.equal(scheduler_metadata, schedule)
    return _attention(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal)


def _operator_schedule(*values: Any) -> Tensor:
    given = dict(zip(_names(GET_SCHEDULER_METADATA), values, strict=True))
    assert given["headdim"] == given["headdim_v"]
    assert given["batch_size"] == len(given["seqused_k"])
    _check_common(given)
    return _schedule(
        given["max_seqlen_q"], given["max_seqlen_k"], (given["num_heads"], given["num_heads_k"], given["headdim"]),
        given["qkv_dtype"], given["page_size"], given["seqused_k"], given["cu_seqlens_q"], given["is_causal"],
    )  # fmt: skip


def _operator_forward(*values: Any) -> list[Tensor]:
    given = dict(zip(_names(FWD), values, strict=True))
    _check_common(given)
    q, k, used, starts = (given[name] for name in ("q", "k", "seqused_k", "cu_seqlens_q"))
    heads = (q.shape[1], k.shape[2], q.shape[2])
    most, causal = given["max_seqlen_k"], given["is_causal"]
    assert torch.equal(
        given["scheduler_metadata"],
        _schedule(given["max_seqlen_q"], most, heads, q.dtype, k.shape[1], used, starts, causal),
    )
    out = _attention(q, k, given["v"], starts, used, given["page_table"], given["softmax_scale"], causal)
    return [out, torch.empty(0), torch.empty(0), torch.empty(0)]


def _check_common(given: dict[str, Any]) -> None:
    """No window, no soft cap, and as many splits as it likes, which is how the schedule was made too."""
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    assert not given.get("softcap")
    assert not given.get("has_softcap")
    assert (given["num_splits"], given["pack_gqa"], given["sm_margin"]) == (0, None, 0)


def _names(schema: str) -> list[str]:
    inside = schema[schema.index("(") + 1 : schema.rindex(")")]
    return [argument.split()[-1] for argument in inside.split(",")]


@contextmanager
def operators() -> Iterator[None]:
    """vLLM's, as its file registers them when it is loaded."""
    with torch.library._scoped_library("_vllm_fa3_C", "DEF") as library:
        for schema, function in ((GET_SCHEDULER_METADATA, _operator_schedule), (FWD, _operator_forward)):
            library.impl(library.define(schema), function, "CPU")
        yield
