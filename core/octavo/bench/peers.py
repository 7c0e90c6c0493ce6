"""Kernels of others, beside which octavo's are measured: backends for the benchmark alone, which serve nobody."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.bench.dense import DenseBackend
from octavo.bench.flashinfer import FlashInferBackend
from octavo.hooks import PROJECT, hookimpl
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import TOKEN_MAJOR, KVCache

ENTRY_POINT = EntryPoint("peers", __name__, PROJECT)
"""What makes them backends to choose from: no distribution names it."""

_OFFICIAL = "flash_attn_interface"
_VLLM_FILE = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_MISSING = f"FlashAttention-3 is not installed: neither {_OFFICIAL} nor {_VLLM_FILE} is on Python's path"
_HOPPER = 9
"""The one compute capability that FlashAttention-3 is written for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, and how FlashAttention-3 shares out its work: made once for all layers."""

    batch: AttentionBatch
    schedule: Tensor


class Library(Protocol):
    """FlashAttention-3 as somebody has built it."""

    def schedule(self, spec: AttentionSpec, batch: AttentionBatch, page: int) -> Tensor:
        """How the work is shared out, in pages of so many tokens."""

    def attend(self, query: Tensor, cache: KVCache, plan: Plan, layer: int, scale: float) -> Tensor:
        """query [tokens, heads, head_size], keys and values [pages, page, kv_heads, head_size], all of one dtype."""


class FA3Backend(AttentionBackend):
    """FlashAttention-3 (arXiv 2407.08608) over a paged cache, from its own package or from vLLM's build of it.

    A cache in float8 wants queries in it too: to convert them is part of `attend`, and so is their rounding.
    """

    name = "fa3"
    platform = "peer"
    contract = 1
    priority = -1
    capabilities = Capabilities(
        dtypes=(torch.bfloat16, torch.float16), kv_dtypes=(torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        head_sizes=(64, 96, 128, 192, 256), block_sizes=(256, ...), graphs="decode", prefix_caching=True,
    )  # fmt: skip
    layout_type = Unmixed(TOKEN_MAJOR, pairs=((torch.bfloat16, torch.float8_e4m3fn),))

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Loads the library. It takes no options."""
        super().__init__(spec, block_size, device, options, sinks)
        if (load := _installed()) is None:
            raise ModuleNotFoundError(_MISSING)
        self._library = load()

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A Hopper GPU, and either build."""
        if device.name != "cuda":
            return f"it runs on cuda, not on {device.name}"
        major, minor = torch.cuda.get_device_capability(device.torch_device)
        if major != _HOPPER:
            return f"it is for GPUs of compute capability {_HOPPER}.0, this one has {major}.{minor}"
        return _MISSING if _installed() is None else None

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Made anew for each step: the benchmark replays the step that it captured."""
        return Plan(batch, self._library.schedule(self.spec, batch, self.block_size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """As the contract says; keys and values come from the cache, this step's too."""
        return self._library.attend(query.to(self.spec.kv_dtype), cache, plan, layer, self.spec.scale)


class _Official:
    """Its own package."""

    def __init__(self) -> None:
        self._module = importlib.import_module(_OFFICIAL)

    def schedule(self, spec: AttentionSpec, batch: AttentionBatch, page: int) -> Tensor:
        # The call takes all that a row of the table has room for as the longest context: the schedule must agree.
        schedule: Tensor = self._module.get_scheduler_metadata(
            batch.rows, batch.max_query, batch.block_table.shape[1] * page, spec.heads, spec.kv_heads, spec.head_size,
            batch.context_lengths, qkv_dtype=spec.kv_dtype, cu_seqlens_q=batch.query_starts, page_size=page,
            causal=True,
        )  # fmt: skip
        return schedule

    def attend(self, query: Tensor, cache: KVCache, plan: Plan, layer: int, scale: float) -> Tensor:
        batch = plan.batch
        out: Tensor = self._module.flash_attn_with_kvcache(
            query, cache.keys[layer], cache.values[layer], cache_seqlens=batch.context_lengths,
            page_table=batch.block_table, cu_seqlens_q=batch.query_starts, max_seqlen_q=batch.max_query,
            softmax_scale=scale, causal=True, scheduler_metadata=plan.schedule,
        )  # fmt: skip
        return out


class _VLLM:
    """What vLLM builds of it: operators, which need nothing else of vLLM."""

    def __init__(self, file: Path) -> None:
        torch.ops.load_library(str(file))
        self._operators = torch.ops._vllm_fa3_C

    def schedule(self, spec: AttentionSpec, batch: AttentionBatch, page: int) -> Tensor:
        schedule: Tensor = _call(
            self._operators.get_scheduler_metadata.default, batch_size=batch.rows, num_heads=spec.heads,
            num_heads_k=spec.kv_heads, headdim=spec.head_size, headdim_v=spec.head_size, qkv_dtype=spec.kv_dtype,
            page_size=page, max_seqlen_k_new=0, has_softcap=False, **_common(batch),
        )  # fmt: skip
        return schedule

    def attend(self, query: Tensor, cache: KVCache, plan: Plan, layer: int, scale: float) -> Tensor:
        out: Tensor = _call(
            self._operators.fwd.default, q=query, k=cache.keys[layer], v=cache.values[layer],
            page_table=plan.batch.block_table, softmax_scale=scale, softcap=0.0, is_rotary_interleaved=True,
            scheduler_metadata=plan.schedule, cp_world_size=1, cp_rank=0, **_common(plan.batch),
        )[0]  # fmt: skip
        return out


def _common(batch: AttentionBatch) -> dict[str, Any]:
    """What both operators are told of a step."""
    return {
        "max_seqlen_q": batch.max_query, "max_seqlen_k": batch.max_context, "cu_seqlens_q": batch.query_starts,
        "seqused_k": batch.context_lengths, "is_causal": True, "window_size_left": -1, "window_size_right": -1,
        "num_splits": 0, "sm_margin": 0,
    }  # fmt: skip


def _call(operator: Any, **given: Any) -> Any:
    """An operator whose arguments have no defaults, and are not the same in every version: those not given are None."""
    return operator(**{argument.name: given.get(argument.name) for argument in operator._schema.arguments})


def _installed() -> Callable[[], Library] | None:
    """What loads it: nothing is imported before."""
    if find_spec(_OFFICIAL) is not None:
        return _Official
    files = (Path(folder, _VLLM_FILE) for folder in sys.path)
    return next((partial(_VLLM, file) for file in files if file.is_file()), None)


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """Where one cannot run, it says so when it is asked."""
    return [FA3Backend, FlashInferBackend, DenseBackend]
