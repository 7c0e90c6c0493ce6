"""`ipex/flashdecoding-ipex` and `ipex/paged` on CPUs: one call for rows of all kinds, and one for rows that decode."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, Capabilities
from octavo.attention.phases import phased
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import KVCache, LayoutType
from octavo_ipex import library
from octavo_ipex.base import OFF, IPEXBackend, Pair
from octavo_ipex.layout import FP8, CPULayout, word
from octavo_ipex.rows import Rows
from octavo_reference.backend import ReferenceBackend

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HEAD_SIZES = (64, 72, 80, 96, 112, 128, 160, 192, 256, 32, 40)


class CPUBackend(IPEXBackend):
    """What both have in common. Keys and values come from the cache, this step's too."""

    platform = "ipex"
    build = library.CPU
    layout_type: ClassVar[LayoutType] = Unmixed(CPULayout.of, pairs=((torch.float32, FP8), (torch.bfloat16, FP8)))

    def _attend(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        self._operators.flash_attn_varlen_func(
            out, query, *held, rows.query_starts, rows.key_starts, rows.most_queries, rows.longest,
            self.spec.scale, True, rows.table, None, self._window, OFF if self._window == OFF else 0,
            word(self.spec.kv_dtype), 1.0, 1.0, self._softcap,
        )  # fmt: skip

    def _decode(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """The window is as long as the longest context and hides nothing.

        Without one, rows that begin with the same block are taken for beams, and the kernel for those refuses to run.
        """
        self._operators.single_query_cached_kv_attention(
            out, query, *held, rows.contexts, self.spec.scale, rows.table, rows.contexts, self.block_size,
            rows.longest, self._slopes, rows.longest, 1.0, 1.0, self._softcap,
        )  # fmt: skip


class FlashDecodingBackend(CPUBackend):
    """Prompts, chunks, rows that decode and any mix of them in one call a layer."""

    name = "flashdecoding-ipex"
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, FP8), head_sizes=_HEAD_SIZES, block_sizes=(64, 16, 32, 128, 256, 512),
        features=frozenset({"window", "softcap"}), prefix_caching=True,
    )  # fmt: skip


class PagedBackend(CPUBackend):
    """Small blocks; rows that decode go to the kernel for single queries where that is right and faster.

    It is the library's only kernel with ALiBi: with that, other rows go to PyTorch.
    """

    name = "paged"
    capabilities = Capabilities(  # a block that does not divide 128 breaks the heap of the kernel for single queries
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, FP8), head_sizes=_HEAD_SIZES, block_sizes=(16, 32, 64, 128),
        features=frozenset({"window", "softcap", "alibi"}), prefix_caching=True,
    )  # fmt: skip

    @cached_property
    def _biased(self) -> AttentionBackend | None:
        """What does all, over the same cache, where there is ALiBi."""
        if self.spec.alibi_slopes is None:
            return None
        alone = self.spec.features == {"alibi"} and self._unmixed()
        return (phased(_Prompts, _Decodes) if alone else _Prompts)(self.spec, self.block_size, self.device)

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        """As its base."""
        return super().plan(batch, bucket) if self._biased is None else self._biased.plan(batch)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Any, layer: int) -> Tensor:
        """As the contract says; zeros for rows of padding."""
        if self._biased is None:
            return super().attend(query, key, value, cache, plan, layer)
        return self._biased.attend(query, key, value, cache, plan, layer)

    def decodes_alone(self) -> bool:
        """Not with a window, where it errs as soon as 128 tokens are hidden, nor with float32 over a cache of bytes.

        A soft cap is refused beside the window that keeps it from its other kernel. It is the faster one in float16,
        over a cache of bytes, and where there is AVX-512.
        """
        spec = self.spec
        if spec.features or not self._unmixed():
            return False
        fast = spec.dtype == torch.float16 or spec.kv_dtype == FP8
        return fast or torch.backends.cpu.get_cpu_capability() == "AVX512"

    def _unmixed(self) -> bool:
        """Can the kernel for single queries read this cache with these queries?"""
        return self.spec.kv_dtype != FP8 or self.spec.dtype == torch.bfloat16


class _Decodes(CPUBackend):
    """Of a layer with ALiBi, rows that decode."""

    name = "paged, rows that decode"
    capabilities = PagedBackend.capabilities

    def decodes_alone(self) -> bool:
        return True


class _Prompts(ReferenceBackend):
    """Of a layer with ALiBi, any rows."""

    name = "paged, prompts"
    capabilities = PagedBackend.capabilities
    layout_type: ClassVar[LayoutType] = CPUBackend.layout_type
