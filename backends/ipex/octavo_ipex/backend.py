"""`ipex/flashdecoding-ipex` and `ipex/paged`: one call for rows of all kinds, and one for rows that decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import KVCache, LayoutType
from octavo_ipex import library
from octavo_ipex.layout import FP8, IPEXLayout, word
from octavo_ipex.rows import Rows

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HEAD_SIZES = (64, 72, 80, 96, 112, 128, 160, 192, 256, 32, 40)
_OFF = -1
"""No window, no soft cap: the library computes something else from any other number that means nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: rows for the call that decodes, which come first, and rows for the one that does all; None: none."""

    single: Rows | None
    varied: Rows | None


class IPEXBackend(AttentionBackend):
    """What both have in common: the kernels that Intel's extension for PyTorch has for CPUs."""

    platform = "ipex"
    contract = 1
    priority = -10
    caution = "Intel has archived this library, which has known security issues and gets no patches"
    layout_type: ClassVar[LayoutType] = Unmixed(IPEXLayout.of, pairs=((torch.float32, FP8), (torch.bfloat16, FP8)))

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Loads the library. Raises RuntimeError where it cannot be loaded, ValueError for what is not declared."""
        if refusals := self.capabilities.refusals(spec, block_size):
            raise ValueError("; ".join(refusals))
        super().__init__(spec, block_size, device, options, sinks)
        self._operators = library.operators()
        self._window = _OFF if spec.window is None else spec.window - 1  # keys before the query's own
        self._softcap = float(_OFF if spec.softcap is None else spec.softcap)

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A CPU, and the library beside the PyTorch that it was built for."""
        return f"it runs on cpu, not on {device.name}" if device.name != "cpu" else library.fault()

    def decodes_alone(self) -> bool:
        """Do rows that decode go to the call that is for them alone?"""
        return False

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Check lengths and tables on the host, once for all layers. Raises ValueError on what is wrong with them."""
        decodes = batch.decodes if self.decodes_alone() else 0
        single = Rows.of(batch, 0, decodes, self.block_size) if decodes else None
        return Plan(single, Rows.of(batch, decodes, batch.rows, self.block_size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """As the contract says; keys and values come from the cache, this step's too. Zeros for rows of padding."""
        parts = [rows for rows in (plan.single, plan.varied) if rows is not None]
        query, keys, values = query.contiguous(), cache.keys[layer], cache.values[layer]
        self._check(query, keys, values, parts)
        alone = self.spec.window == 1  # which the library takes for no window: a token sees itself
        out = self._own(value) if alone else torch.empty_like(query)
        start = 0
        for rows in parts:
            own = slice(start, start + rows.tokens)
            if not alone:
                call = self._decode if rows is plan.single else self._attend
                call(out[own], query[own], keys, values, rows)
            if rows.padding is not None:
                out[own].masked_fill_(rows.padding[:, None, None], 0)
            start += rows.tokens
        return out

    def _own(self, value: Tensor) -> Tensor:
        """What tokens make of their own values alone, as the cache holds them: a copy."""
        return value.to(self.spec.kv_dtype).to(self.spec.dtype).repeat_interleave(self.spec.group, dim=1)

    def _attend(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """Rows of any kind."""
        self._operators.flash_attn_varlen_func(
            out, query, keys, values, rows.query_starts, rows.key_starts, rows.most_queries, rows.longest,
            self.spec.scale, True, rows.table, None, self._window, _OFF if self._window == _OFF else 0,
            word(self.spec.kv_dtype), 1.0, 1.0, self._softcap,
        )  # fmt: skip

    def _decode(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """Rows with one query each.

        The window is as long as the longest context and hides nothing: without one, rows that begin with the same
        block are taken for beams, and the kernel for those refuses to run.
        """
        self._operators.single_query_cached_kv_attention(
            out, query, keys, values, rows.contexts, self.spec.scale, rows.table, rows.contexts, self.block_size,
            rows.longest, None, rows.longest, 1.0, 1.0, self._softcap,
        )  # fmt: skip

    def _check(self, query: Tensor, keys: Tensor, values: Tensor, parts: list[Rows]) -> None:
        """What would be read or written out of range. Raises ValueError."""
        spec = self.spec
        tokens = sum(rows.tokens for rows in parts)
        if query.shape != (tokens, spec.heads, spec.head_size) or query.dtype != spec.dtype:
            raise ValueError(
                f"the query is {tuple(query.shape)} of {query.dtype}, "
                f"the step's is {(tokens, spec.heads, spec.head_size)} of {spec.dtype}"
            )
        shape = (len(keys), spec.kv_heads, self.block_size, spec.head_size)
        for held in (keys, values):
            if held.shape != shape or held.dtype != spec.kv_dtype or not held.is_contiguous():
                raise ValueError(
                    f"a cache of {tuple(held.shape)}, {held.dtype}, strides {held.stride()} is not one of {shape}, "
                    f"{spec.kv_dtype}, without gaps"
                )
        highest = max((rows.highest_block for rows in parts), default=0)
        if highest >= len(keys):
            raise ValueError(f"block {highest} of the table is not in a cache of {len(keys)} blocks")


class FlashDecodingBackend(IPEXBackend):
    """Prompts, chunks, rows that decode and any mix of them in one call a layer."""

    name = "flashdecoding-ipex"
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, FP8), head_sizes=_HEAD_SIZES, block_sizes=(64, 16, 32, 128, 256, 512),
        features=frozenset({"window", "softcap"}), prefix_caching=True,
    )  # fmt: skip


class PagedBackend(IPEXBackend):
    """Small blocks; rows that decode go to the kernel for single queries where that is right and faster."""

    name = "paged"
    capabilities = Capabilities(  # a block that does not divide 128 breaks the heap of the kernel for single queries
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, FP8), head_sizes=_HEAD_SIZES, block_sizes=(16, 32, 64, 128),
        features=frozenset({"window", "softcap"}), prefix_caching=True,
    )  # fmt: skip

    def decodes_alone(self) -> bool:
        """Not with a window, where it errs as soon as 128 tokens are hidden, nor with float32 over a cache of bytes.

        A soft cap is refused beside the window that keeps it from its other kernel. It is the faster one in float16,
        over a cache of bytes, and where there is AVX-512.
        """
        spec = self.spec
        unmixed = spec.kv_dtype != FP8 or spec.dtype == torch.bfloat16
        if spec.features or not unmixed:
            return False
        fast = spec.dtype == torch.float16 or spec.kv_dtype == FP8
        return fast or torch.backends.cpu.get_cpu_capability() == "AVX512"
