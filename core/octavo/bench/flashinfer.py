"""FlashInfer as its own documentation calls it, to see what a backend costs around its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import TOKEN_MAJOR, KVCache

_FLOATS = (torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WORKSPACE_BYTES = 512 << 20
"""More than its plan of any batch takes."""


class FlashInferBackend(AttentionBackend):
    """FlashInfer (arXiv 2501.01005) in a graph: its attention, its kernel for tensor cores, its plan, nothing else."""

    name = "flashinfer"
    platform = "peer"
    contract = 1
    priority = -1
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, *_FLOAT8), head_sizes=(64, 128, 256), block_sizes=(1, 16, 32, 64),
        graphs="decode", prefix_caching=True,
    )  # fmt: skip
    layout_type = Unmixed(TOKEN_MAJOR, pairs=tuple(product(_FLOATS, _FLOAT8)))

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Takes no options."""
        super().__init__(spec, block_size, device, options, sinks)
        self._library = importlib.import_module("flashinfer")
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A GPU of NVIDIA's, and FlashInfer."""
        if device.name != "cuda":
            return f"it runs on cuda, not on {device.name}"
        return None if find_spec("flashinfer") else "FlashInfer is not installed: pip install flashinfer-python"

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        """A wrapper of its own for each step. Raises ValueError for a step in which not all rows decode."""
        if batch.decodes != batch.rows:
            raise ValueError("it is measured where all rows decode: say --only decode")
        spec, table, size = self.spec, batch.block_table, self.block_size
        pages = -(-batch.context_lengths // size)
        starts = torch.zeros(batch.rows + 1, dtype=torch.int32, device=table.device)
        starts[1:] = pages.cumsum(0)
        last = (batch.context_lengths - (pages - 1) * size).to(torch.int32)
        indices = table[torch.arange(table.shape[1], device=table.device) < pages[:, None]]
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(), backend="fa2",
        )  # fmt: skip
        wrapper.plan(
            starts.cpu(), indices, last.cpu(), spec.heads, spec.kv_heads, spec.head_size, size,
            q_data_type=spec.dtype, kv_data_type=spec.kv_dtype, sm_scale=spec.scale,
        )  # fmt: skip
        return wrapper

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Any, layer: int) -> Tensor:
        """As the contract says; keys and values come from the cache, this step's too."""
        out: Tensor = plan.run(query, (cache.keys[layer], cache.values[layer]), out=torch.empty_like(query))
        return out
