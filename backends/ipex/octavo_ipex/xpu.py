"""`xpu/flashdecoding-ipex` and `xpu/paged`: the library's kernels for Intel's GPUs, which octavo has never run.

All that is said of them here was read in the library's source at its tag v2.8.10+xpu. Its Python package has the same
names for CPUs and GPUs; behind them stand other operators on GPUs, whose arguments come in another order. What the
package takes for single queries beside these reaches no kernel: a window is ignored, and a cache of bytes is converted
as a whole at each call.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch, Capabilities
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import LayoutType
from octavo_ipex import library
from octavo_ipex.base import OFF, IPEXBackend, Pair, Plan
from octavo_ipex.layout import XPUFlashLayout, XPUPagedLayout
from octavo_ipex.rows import Rows

_FLOATS = (torch.float16, torch.bfloat16)
"""For float32 the library prints that there is no kernel, and leaves the output as it is."""
_HEAD_SIZES = (64, 128, 256)
"""Its kernels are compiled for these; for others its Python package pads every block that is read, at each call."""


class XPUBackend(IPEXBackend):
    """What both have in common. Never run by octavo on a GPU: the tests imitate the library as its source has it."""

    platform = "xpu"
    caution = f"{IPEXBackend.caution}; octavo has never run it on a GPU: what it calls is known from source alone"
    build = library.XPU


class FlashDecodingBackend(XPUBackend):
    """Prompts, chunks, rows that decode and any mix of them in one call a layer. Never run by octavo on a GPU.

    Blocks are of 64 tokens: the library's own tests run no others with this kernel.
    """

    name = "flashdecoding-ipex"
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=_FLOATS, head_sizes=_HEAD_SIZES, block_sizes=(64,),
        features=frozenset({"window", "softcap"}), prefix_caching=True,
    )  # fmt: skip
    layout_type: ClassVar[LayoutType] = Unmixed(XPUFlashLayout.of)

    def _attend(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """From the cache."""
        self._operators.chunked_prefill(
            query, *held, out, rows.query_starts, rows.key_starts, None, rows.table, None, rows.most_queries,
            rows.longest, 0.0, self.spec.scale, False, self._window, OFF if self._window == OFF else 0, True, False,
            None, self._softcap,
        )  # fmt: skip


class PagedBackend(XPUBackend):
    """Rows that decode by the kernel for single queries, prompts whole. Never run by octavo on a GPU.

    No kernel reads this layout for several queries, so prompts are not cut into chunks and prefixes are not reused; and
    none hides what a window hides from a row that decodes, so windows are refused.
    """

    name = "paged"
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=_FLOATS, head_sizes=_HEAD_SIZES, block_sizes=(16, 32), features=frozenset({"softcap"})
    )
    layout_type: ClassVar[LayoutType] = Unmixed(XPUPagedLayout.of)

    def decodes_alone(self) -> bool:
        """Always."""
        return True

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """As ever, and raises ValueError for several queries behind what an earlier step wrote."""
        plan = super().plan(batch, bucket)
        if plan.varied is not None and not plan.varied.fresh:
            raise ValueError("several queries behind keys of an earlier step: it attends to prompts as a whole alone")
        return plan

    def _attend(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """From this step's keys and values: there are no older ones."""
        key, value = (one.to(self.spec.dtype).contiguous() for one in new)
        self._operators.varlen_fwd(
            query, key, value, out, rows.query_starts, rows.query_starts, None, None, rows.most_queries,
            rows.most_queries, 0.0, self.spec.scale, False, OFF, OFF, True, False, None, self._softcap,
        )  # fmt: skip

    def _decode(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """From the cache."""
        self._operators.paged_attention(
            out, query, *held, rows.table, rows.contexts, self.spec.group, self.spec.scale, self.block_size,
            rows.longest, None, self._softcap,
        )  # fmt: skip
