"""FlashInfer's wrappers, told what a group of layers is. This is the only module that needs FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import flashinfer
import numpy as np
import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo_flashinfer.pages import Pages, pinned, sent
from octavo_flashinfer.variant import jit_args, run_args
from octavo_flashinfer.workspace import INTEGERS, Workspace

_LAYOUT = "NHD"
"""[pages, page, kv_heads, head_size]."""
_DECODING = "fa2"
"""FlashInfer's name of the kernel, which is the one for prompts too: on tensor cores, whatever the size of a group."""


@dataclass(frozen=True)
class Layers:
    """A group of layers, and the kernels that it runs on."""

    spec: AttentionSpec
    block_size: int
    workspace: Workspace
    prefill: str
    """FlashInfer's name of the kernel for prompts: "fa2", or on Hopper "fa3"."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """As all plans want them, in this order."""
        return self.spec.heads, self.spec.kv_heads, self.spec.head_size, self.block_size

    @cached_property
    def settings(self) -> dict[str, Any]:
        """As all plans want them, by name."""
        spec = self.spec
        return {
            "window_left": -1 if spec.window is None else spec.window - 1,  # keys before the query's own
            "logits_soft_cap": spec.softcap or 0.0,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.kv_dtype,
            "sm_scale": spec.scale,
        }


class Decoding:
    """One query token a row."""

    def __init__(self, layers: Layers) -> None:
        """Builds the kernels, or loads them."""
        self.layers = layers
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            layers.workspace.floats, _LAYOUT, use_tensor_cores=True, backend=_DECODING,
            jit_args=jit_args(layers.spec, _DECODING),
        )  # fmt: skip
        self._scalars = run_args(layers.spec, _DECODING)
        self._wrapper.plan(*_smallest(layers), *layers.sizes, **layers.settings)

    def plan(self, pages: Pages, indices: Tensor) -> None:
        """indices: int32, on the device."""
        starts, last = (pinned(each, indices.device) for each in (pages.starts, pages.last))
        self._wrapper.plan(starts, indices, last, *self.layers.sizes, **self.layers.settings)

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """query, out: [rows, heads, head_size]."""
        self._wrapper.run(query, (keys, values), *self._scalars, out=out)


class Prefill:
    """Any number of query tokens a row, but not none."""

    def __init__(self, layers: Layers) -> None:
        """Builds the kernels, or loads them."""
        self.layers = layers
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            layers.workspace.floats, _LAYOUT, backend=layers.prefill, jit_args=jit_args(layers.spec, layers.prefill)
        )
        self._scalars = run_args(layers.spec, layers.prefill)
        starts, indices, last = _smallest(layers)
        self._plan(starts, starts, indices, last, 1)

    def plan(self, query_starts: Tensor, pages: Pages, indices: Tensor, max_query: int) -> None:
        """query_starts: [rows + 1] int32, on the host; indices: int32, on the device."""
        device = indices.device
        query_starts, starts, last = (pinned(each, device) for each in (query_starts, pages.starts, pages.last))
        self._plan(query_starts, starts, indices, last, max_query)

    def _plan(self, query_starts: Tensor, starts: Tensor, indices: Tensor, last: Tensor, max_query: int) -> None:
        self._wrapper.plan(
            query_starts, starts, indices, last, *self.layers.sizes, causal=True, max_token_per_sequence=max_query,
            **self.layers.settings,
        )  # fmt: skip

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """query, out: [tokens, heads, head_size]."""
        self._wrapper.run(query, (keys, values), *self._scalars, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """What captured steps read of a batch, and of their plan. They are replayed one at a time, so they share it."""

    starts: Tensor
    """[rows + 1] int32."""
    last: Tensor
    """[rows] int32."""
    indices: Tensor
    """[pages of all rows] int32."""
    integers: Tensor
    """uint8 [bytes]: who does which part."""

    @classmethod
    def of(cls, rows: int, pages: int, device: torch.device) -> Storage:
        """Room for so many."""
        starts, last, indices = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows, pages)
        )
        return cls(starts, last, indices, torch.zeros(INTEGERS, dtype=torch.uint8, device=device))

    def holds(self, rows: int, pages: int) -> bool:
        """Is there room?"""
        return rows <= len(self.last) and pages <= len(self.indices)


class Captured:
    """A step of so many rows that decode, in which nothing moves and no launch changes, whatever the contexts are."""

    def __init__(self, layers: Layers, storage: Storage, rows: int) -> None:
        """FlashInfer splits contexts so that the number of parts is always the same."""
        self.layers = layers
        self._starts, self._last, self._indices = storage.starts[: rows + 1], storage.last[:rows], storage.indices
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            layers.workspace.floats, _LAYOUT, use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=self._starts, paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last, backend=_DECODING, jit_args=jit_args(layers.spec, _DECODING),
        )  # fmt: skip
        self._scalars = run_args(layers.spec, _DECODING)
        self._wrapper.reset_workspace_buffer(layers.workspace.floats, storage.integers)
        blank = Pages.of(np.zeros(rows, np.int32), layers.block_size)
        self._wrapper.plan(blank.starts, self._indices[:rows], blank.last, *layers.sizes, **layers.settings)

    def room(self, pages: int) -> Tensor | None:
        """Where the ids of so many pages go; None where they do not."""
        return self._indices[:pages] if pages <= len(self._indices) else None

    def plan(self, pages: Pages) -> None:
        """The pages' ids are in their place."""
        self._starts.copy_(sent(pages.starts, self._starts.device), non_blocking=True)
        self._last.copy_(sent(pages.last, self._last.device), non_blocking=True)
        flashinfer.fast_decode_plan(
            self._wrapper, pages.starts, self._indices[: pages.total], pages.last, *self.layers.sizes,
            **self.layers.settings, global_override_indptr_cpu=pages.starts,
        )  # fmt: skip

    def run(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """query, out: [rows, heads, head_size]."""
        self._wrapper.run(query, (keys, values), *self._scalars, out=out)


def _smallest(layers: Layers) -> tuple[Tensor, Tensor, Tensor]:
    """One row with one token: what is enough to have the kernels built."""
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.arange(2, dtype=torch.int32)
    return starts, torch.zeros(1, dtype=torch.int32, device=layers.workspace.floats.device), one
