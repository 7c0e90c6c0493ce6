"""What octavo calls of FlashInfer, with its signatures and its demands, computing in float64 on a CPU.

What plan hands to the kernels goes through the workspace of integers, as there: a step that runs on another plan, or
on buffers that were not refreshed with it, is an error. So is a launch that differs from the one that a graph captured.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HIDDEN = -5e4
"""The score of a key that is not seen, before it is scaled (flashinfer/math.cuh: inf)."""
PROCESSORS = 8


class Variant:
    """What is to be compiled in the place of its own attention, as far as answers depend on it (`jit_args`)."""

    built: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012  by name: what is compiled is found again by that alone

    def __init__(self, jit_args: list[Any], kernel: str) -> None:
        name, self.query, self.cache, out, index, self.size, value_size, *rest = jit_args
        tensors, tensor_dtypes, scalars, scalar_dtypes, variant, declared, positions, self.windowed = rest
        assert (out, index, value_size, positions) == (self.query, torch.int32, self.size, 0)
        assert (tensors, tensor_dtypes, scalars, scalar_dtypes) == ([], [], ["sm_scale"], ["double"])
        assert self.built.setdefault(name, (kernel, *jit_args)) == (kernel, *jit_args), f"{name} is something else too"
        base = f"DefaultAttention<false, {str(self.windowed).lower()}, false, false>"
        assert f"struct {variant} : {base if kernel == 'fa2' else 'StandardAttention'} {{" in declared
        smaller = re.search(r"return logits / (\d+);", declared) if kernel == "fa2" else None
        self.smaller = int(smaller[1]) if smaller else 1
        hidden = re.search(r"fill_value = -0x1p(\d+)f;", declared) if kernel == "fa3" else None
        self.hidden = -(2.0 ** int(hidden[1])) if hidden else HIDDEN

    def check(self, told: dict[str, Any]) -> None:
        """It is for what is planned."""
        assert not told["logits_soft_cap"], "the variant has none"
        assert (told["q_data_type"], told["kv_data_type"]) == (self.query, self.cache)
        assert (told["head_dim"], told["window_left"] >= 0) == (self.size, self.windowed)


class Wrapper:
    """What both have in common."""

    made: list[Wrapper] = []  # noqa: RUF012  all of them, for tests to look at

    def __init__(
        self, floats: Tensor, kv_layout: str, buffers: tuple[Tensor | None, ...], jit_args: Any, kernel: str
    ) -> None:
        self.variant = None if jit_args is None else Variant(jit_args, kernel)
        assert kv_layout == "NHD"
        assert not floats.any(), "it must be zeros at first"
        self.floats, self.buffers, self.graph = floats, buffers, any(buffer is not None for buffer in buffers)
        self.integers = torch.empty(8 << 20, dtype=torch.uint8)
        self.told: dict[str, Any] = {}
        self.launched: tuple[Any, ...] | None = None
        Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self.floats, self.integers = float_workspace_buffer, int_workspace_buffer

    def _planned(self, query_starts: Tensor, starts: Tensor, last: Tensor, told: dict[str, Any]) -> None:
        rows = len(starts) - 1
        for host in (query_starts, starts, last):
            assert (host.device.type, host.dtype) == ("cpu", torch.int32)
        assert told["num_qo_heads"] % told["num_kv_heads"] == 0
        assert (starts.diff() >= 1).all(), "a captured step has no room for rows without pages"
        assert ((last >= 0) & (last <= told["page_size"])).all()
        group = told["num_qo_heads"] // told["num_kv_heads"]
        if self.variant is not None:
            self.variant.check(told)
        assert self._needed(query_starts, rows, group, told) <= len(self.floats), "the workspace is too small"
        self.told = told
        self._plan = torch.cat([query_starts, starts, last]).view(torch.uint8)
        self.integers[: len(self._plan)] = self._plan

    def _needed(self, query_starts: Tensor, rows: int, group: int, told: dict[str, Any]) -> int:
        """Bytes of what is split (flashinfer/attention/scheduler.cuh: PrefillPlan)."""
        size, heads, key_heads = (int(told[name]) for name in ("head_dim", "num_qo_heads", "num_kv_heads"))
        most = 2 * PROCESSORS // key_heads
        queries = query_starts.diff() * group
        length = int(queries[0]) if self.graph else int(queries.sum()) // rows
        tile = 128 if length > 64 and size < 256 else 64 if length > 16 else 16
        tiles = -(-rows * group // tile) + rows - 1 if self.graph else 0
        return 4 * (size + 1) * heads * tile * max(most, tiles)

    def _run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], scalars: tuple[float, ...], out: Tensor,
        read: tuple[Tensor, ...], *, causal: bool,
    ) -> Tensor:  # fmt: skip
        told, (query_starts, starts, indices, last) = self.told, read
        assert len(scalars) == (self.variant is not None), "its own attention takes the scale from the plan"
        assert indices.dtype == torch.int32
        assert (query.dtype, out.dtype) == (told["q_data_type"], told["q_data_type"])
        assert out.shape == query.shape
        assert out.is_contiguous()
        assert all(held.dtype == told["kv_data_type"] for held in cache)
        given = torch.cat([query_starts, starts, last]).view(torch.uint8)
        assert torch.equal(self.integers[: len(given)], given), "this is not the step that was planned last"
        if self.graph:
            launch = (*(buffer.data_ptr() for buffer in read), self.integers.data_ptr(), self.floats.data_ptr(), told)
            launch = (*launch, scalars)
            assert self.launched in (None, launch), "a graph would launch what it has captured"
            self.launched = launch
        for row in range(len(last)):
            pages = indices[int(starts[row]) : int(starts[row + 1])].long()
            context = (len(pages) - 1) * told["page_size"] + int(last[row])
            own = slice(int(query_starts[row]), int(query_starts[row + 1]))
            keys, values = (held[pages].flatten(0, 1)[:context].double() for held in cache)
            out[own] = self._attended(query[own].double(), keys, values, scalars, causal).to(out.dtype)
        return out

    def _attended(
        self, query: Tensor, keys: Tensor, values: Tensor, scalars: tuple[float, ...], causal: bool
    ) -> Tensor:
        """[new, heads, size] of [context, kv_heads, size]; zeros without a context."""
        told, new, context = self.told, len(query), len(keys)
        group = query.shape[1] // keys.shape[1]
        keys, values = (held.repeat_interleave(group, dim=1) for held in (keys, values))
        scores, scale = torch.einsum("qhd,khd->hqk", query, keys), told["sm_scale"]
        hidden = HIDDEN
        if cap := told["logits_soft_cap"]:
            scores, scale = torch.tanh(scores * scale / cap), cap
        if self.variant is not None:
            scores, (scale,), hidden = scores / self.variant.smaller, scalars, self.variant.hidden
        places, own = torch.arange(context), torch.arange(context - new, context)[:, None]
        seen = (places <= own) if causal else torch.ones(new, context, dtype=torch.bool)
        if told["window_left"] >= 0:
            seen &= places + told["window_left"] >= own
        scores = torch.cat([scores.masked_fill(~seen, hidden), torch.full((*scores.shape[:2], 1), hidden)], dim=-1)
        weights = torch.exp((scores - scores.amax(-1, keepdim=True)) * scale)[..., :-1]
        total = weights.sum(-1, keepdim=True)
        return torch.einsum("hqk,khd->qhd", weights / total.clamp(min=1e-300), values)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, buffers, jit_args, backend)
        assert self.graph == use_cuda_graph
        assert (backend, use_tensor_cores) == ("fa2", True)
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, data_type: Any = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:  # fmt: skip
        told = {
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size,
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale,
        }  # fmt: skip
        self._indices = indices
        if self.graph:
            starts, pages, last = self.buffers
            assert starts is not None
            assert pages is not None
            assert last is not None
            starts.copy_(indptr)
            last.copy_(last_page_len)
            pages[: len(indices)].copy_(indices)
            self._indices = pages
        self._read = (indptr, self._indices, last_page_len)
        self._planned(self._query_starts(len(last_page_len)), indptr, last_page_len, told)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None, q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: Any = None,
    ) -> Tensor:  # fmt: skip
        assert out is not None
        starts, indices, last = self.buffers if self.graph else self._read
        assert starts is not None
        assert indices is not None
        assert last is not None
        assert len(q) == len(last)
        read = (self._query_starts(len(last)), starts, indices, last)
        return self._run(q, paged_kv_cache, args, out, read, causal=False)

    def _query_starts(self, rows: int) -> Tensor:
        """Made once: a graph reads it where it is."""
        held: Tensor | None = self.__dict__.get("_arange")
        if held is None or len(held) != rows + 1:
            held = self._arange = torch.arange(rows + 1, dtype=torch.int32)
        return held


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
    window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = None, kv_data_type: Any = None,
    data_type: Any = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, non_blocking: bool = True, fixed_split_size: int | None = None,
    disable_split_kv: bool = False, global_override_indptr_cpu: Tensor | None = None,
) -> None:  # fmt: skip
    """As `plan`, but that the buffers of a captured step are the caller's to fill."""
    assert self.told, "it needs the kernels that plan has loaded"
    assert self.graph
    assert global_override_indptr_cpu is not None
    assert len(indices) == global_override_indptr_cpu[-1]
    told = {
        "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size,
        "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
        "kv_data_type": kv_data_type, "sm_scale": sm_scale,
    }  # fmt: skip
    self._planned(self._query_starts(len(last_page_len)), global_override_indptr_cpu, last_page_len, told)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None, mask_indptr_buf: Tensor | None = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        buffers = (qo_indptr_buf, paged_kv_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, buffers, jit_args, backend)
        assert not self.graph
        assert backend in ("fa2", "fa3")
        self.backend = backend

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, non_blocking: bool = True, prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None, seq_lens: Tensor | None = None, seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        assert self.backend == "fa2" or kv_data_type == q_data_type, "FA3 converts no cache"
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        assert (qo_indptr.diff() > 0).all()
        self._causal = causal
        self._read = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        told = {
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim_qk,
            "page_size": page_size, "window_left": window_left, "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale,
        }  # fmt: skip
        self._planned(qo_indptr, paged_kv_indptr, paged_kv_last_page_len, told)

    def _needed(self, query_starts: Tensor, rows: int, group: int, told: dict[str, Any]) -> int:
        return super()._needed(query_starts, rows, group, told) if self.backend == "fa2" else 0

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: Tensor | None = None, kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert out is not None
        assert len(q) == self._read[0][-1]
        return self._run(q, paged_kv_cache, args, out, self._read, causal=self._causal)


CALLED = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, fast_decode_plan)


def module() -> ModuleType:
    """`import flashinfer`."""
    made = ModuleType("flashinfer")
    for called in CALLED:
        setattr(made, called.__name__, called)
    return made
