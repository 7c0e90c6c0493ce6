"""Steps over a cache of NaN, and the truth in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo.conformance.truth import attention
from octavo_ipex.base import IPEXBackend

WHERE = torch.device("cpu")


class Card(CPU):
    """A CPU that claims to be an Intel GPU."""

    name = "xpu"


def spec_of(**changed: Any) -> AttentionSpec:
    plain = {"layers": 1, "heads": 8, "kv_heads": 2, "head_size": 64, "scale": 0.125}
    dtypes = {"dtype": torch.float32, "kv_dtype": torch.float32}
    return AttentionSpec(**(plain | dtypes | changed))


def last(held: Tensor, count: int) -> Tensor:
    """So many of what a row holds; NaN for padding, which holds nothing."""
    return held[len(held) - count :] if len(held) else held.new_full((count, *held.shape[1:]), torch.nan)


class Step:
    """Rows whose contexts, of these lengths, end with so many queries; each has blocks of its own, but shared ones."""

    def __init__(
        self, kind: type[IPEXBackend], contexts: Sequence[int], new: Sequence[int], size: int = 16,
        shared: int = 0, spread: float = 1.0, spec: AttentionSpec | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec or spec_of()
        self.backend, self.size = kind(self.spec, size, CPU()), size
        torch.manual_seed(0)
        widths = [-(-context // size) for context in contexts]
        self.cache = self.backend.layout.allocate(sum(widths) + 1, WHERE)
        for held in (*self.cache.keys, *self.cache.values):
            held.fill_(torch.nan)
        table = torch.zeros(len(contexts), max(*widths, 1), dtype=torch.int32)
        ids = iter((torch.randperm(sum(widths)) + 1).tolist())
        for row, width in enumerate(widths):
            own = [next(ids) for _ in range(width)]
            table[row, :width] = torch.tensor([*table[0, :shared].tolist(), *own[shared:]] if row else own)
        heads = (self.spec.kv_heads, self.spec.head_size)
        prefix = [torch.randn(shared * size, *heads) for _ in range(2)]
        self.rows = [
            [torch.cat([part, torch.randn(max(context - shared * size, 0), *heads)])[:context] for part in prefix]
            for context in contexts
        ]
        self.rows = [[(keys * spread).to(self.spec.dtype), values.to(self.spec.dtype)] for keys, values in self.rows]
        slots = [self._slots(table[row], context) for row, context in enumerate(contexts)]
        for (keys, values), places in zip(self.rows, slots, strict=True):
            self.backend.layout.write(self.cache, 0, keys, values, places)
        counts = list(new)
        self.query = torch.randn(sum(counts), self.spec.heads, self.spec.head_size).to(self.spec.dtype)
        ends = list(accumulate(counts))
        self.own = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.batch = AttentionBatch(
            query_starts=torch.tensor([0, *ends], dtype=torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            block_table=table,
            slots=torch.cat([places[len(places) - count :] for places, count in zip(slots, counts, strict=True)]),
            max_query=max(counts),
            max_context=max(contexts),
            decodes=next((row for row, count in enumerate(counts) if count != 1), len(counts)),
        )

    def _slots(self, table: Tensor, context: int) -> Tensor:
        tokens = torch.arange(context)
        return table[tokens // self.size].long() * self.size + tokens % self.size

    def attend(self, **changed: Any) -> Tensor:
        """Of the batch, changed so."""
        plan = self.backend.plan(replace(self.batch, **changed))
        counts = [own.stop - own.start for own in self.own]
        new = [
            torch.cat([last(row[part], count) for row, count in zip(self.rows, counts, strict=True)])
            for part in range(2)
        ]
        return self.backend.attend(self.query, new[0], new[1], self.cache, plan, 0)

    def check(self, answer: Tensor, limit: float = 1e-5) -> None:
        """Against float64."""
        for (keys, values), own in zip(self.rows, self.own, strict=True):
            if own.stop > own.start and len(keys):
                truth = attention(self.query[own], keys, values, None, spec=self.spec)
                assert float((answer[own].double() - truth).norm() / truth.norm()) < limit
