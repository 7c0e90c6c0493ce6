"""What the backends of both builds of the library have in common: a step is checked, then its rows are handed over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.attention.device import Device
from octavo.kv.layout import KVCache
from octavo_ipex import library
from octavo_ipex.layout import IPEXLayout
from octavo_ipex.rows import Rows

OFF: Final = -1
"""No window, no soft cap: the library computes something else from any other number that means nothing."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: rows for the call that decodes, which come first, and rows for the one that does all; None: none."""

    single: Rows | None
    varied: Rows | None


class IPEXBackend(AttentionBackend):
    """Kernels of Intel's extension for PyTorch, guarded against what they do not look at."""

    contract = 1
    priority = -10
    caution = "Intel has archived this library, which has known security issues and gets no patches"
    build: ClassVar[library.Build]

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
        assert isinstance(self.layout, IPEXLayout)
        self._block = self.layout.key_order.shape[1:]  # values have the same
        self._operators = library.operators(self.build)
        self._window = OFF if spec.window is None else spec.window - 1  # keys before the query's own
        self._softcap = float(OFF if spec.softcap is None else spec.softcap)
        slopes = spec.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """Its kind of device, and the library beside the PyTorch that it was built for."""
        wanted = cls.build.device
        return library.fault(cls.build) if device.name == wanted else f"it runs on {wanted}, not on {device.name}"

    def decodes_alone(self) -> bool:
        """Do rows that decode go to the call that is for them alone?"""
        return False

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Check lengths and tables on the host, once for all layers. Raises ValueError on what is wrong with them."""
        decodes = batch.decodes if self.decodes_alone() else 0
        single = Rows.of(batch, 0, decodes, self.block_size) if decodes else None
        return Plan(single, Rows.of(batch, decodes, batch.rows, self.block_size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """As the contract says; zeros for rows of padding."""
        parts = [rows for rows in (plan.single, plan.varied) if rows is not None]
        query, held = query.contiguous(), (cache.keys[layer], cache.values[layer])
        self._check(query, held, parts)
        alone = self.spec.window == 1  # which the library takes for no window: a token sees itself
        out = self._own(value) if alone else torch.empty_like(query)
        start = 0
        for rows in parts:
            own = slice(start, start + rows.tokens)
            if not alone:
                call = self._decode if rows is plan.single else self._attend
                call(out[own], query[own], (key[own], value[own]), held, rows)
            if rows.padding is not None:
                out[own].masked_fill_(rows.padding[:, None, None], 0)
            start += rows.tokens
        return out

    def _own(self, value: Tensor) -> Tensor:
        """What tokens make of their own values alone, as the cache holds them: a copy."""
        return value.to(self.spec.kv_dtype).to(self.spec.dtype).repeat_interleave(self.spec.group, dim=1)

    @abstractmethod
    def _attend(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """Rows of any kind; `new` are this step's keys and values, which `held`, the cache, has too."""

    def _decode(self, out: Tensor, query: Tensor, new: Pair, held: Pair, rows: Rows) -> None:
        """Rows with one query each, where they decode alone: as any others, but for who has a call for them."""
        self._attend(out, query, new, held, rows)

    def _check(self, query: Tensor, held: Pair, parts: list[Rows]) -> None:
        """What would be read or written out of range. Raises ValueError."""
        spec, blocks = self.spec, len(held[0])
        tokens = sum(rows.tokens for rows in parts)
        if query.shape != (tokens, spec.heads, spec.head_size) or query.dtype != spec.dtype:
            raise ValueError(
                f"the query is {tuple(query.shape)} of {query.dtype}, "
                f"the step's is {(tokens, spec.heads, spec.head_size)} of {spec.dtype}"
            )
        shape = (blocks, *self._block)
        for cache in held:
            if cache.shape != shape or cache.dtype != spec.kv_dtype or not cache.is_contiguous():
                raise ValueError(
                    f"a cache of {tuple(cache.shape)}, {cache.dtype}, strides {cache.stride()} is not one of {shape}, "
                    f"{spec.kv_dtype}, without gaps"
                )
        highest = max((rows.highest_block for rows in parts), default=0)
        if highest >= blocks:
            raise ValueError(f"block {highest} of the table is not in a cache of {blocks} blocks")
