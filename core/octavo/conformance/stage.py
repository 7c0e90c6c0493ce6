"""Where a case plays: one backend object, its dirty cache, and the history of every row, which never was in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, HostLengths
from octavo.attention.device import Device
from octavo.conformance.configuration import Configuration
from octavo.conformance.diagnosis import Asked, explain
from octavo.conformance.dirty import DirtyCache
from octavo.conformance.truth import EXACT, Fault, attention, deviation, judge, limit

LOGIT_SPREAD = 3.0
"""Standard deviation of the logits: attention is peaked, so that a wrong key weighs much and a rounded logit shows."""
SINK = 4.0
"""Mean of the sinks, near the log-sum-exp of a row's logits: neither side outweighs the other."""

Draw = Callable[..., Tensor]
"""From a shape to float32 numbers on the CPU."""


@dataclass(slots=True)
class Row:
    """One sequence: keys and values [layers, tokens, kv_heads, head_size] in float64, and the blocks that hold them."""

    keys: Tensor
    values: Tensor
    blocks: list[int]

    def __len__(self) -> int:
        return int(self.keys.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One packed forward and its truth. query, key, value and truth: [layers, tokens, heads, head_size].

    query, key and value are what the backend is given: where there are scales, they are in it already.
    """

    batch: AttentionBatch
    query: Tensor
    key: Tensor
    value: Tensor
    truth: Tensor
    """float64 on the CPU, without the tokens of padding rows."""
    new: tuple[int, ...]
    """Query tokens of each row, padding rows not among them."""
    contexts: tuple[int, ...]
    rows: tuple[Row, ...]
    """They may have grown since."""
    asked: Tensor
    """The query before any scales, float64 on the CPU."""


class Stage:
    """Draws rows and steps, lets the backend answer, and compares with float64 attention over the histories."""

    def __init__(
        self, backend: type[AttentionBackend], configuration: Configuration, device: Device, seed: int
    ) -> None:
        self.capabilities = backend.capabilities_on(device)
        self.configuration = configuration
        self.spec = spec = configuration.spec
        self.device = device.torch_device
        self.generator = torch.Generator().manual_seed(seed)
        self.sinks = SINK + self.randn(spec.layers, spec.heads) if spec.sinks else None
        on_device = None if self.sinks is None else self.sinks.to(self.device)
        self.backend = backend(spec, configuration.block_size, device, sinks=on_device)
        self.cache = DirtyCache(self.backend.layout, configuration, device, self.generator)
        self.rows: list[Row] = []
        """All rows so far."""
        self.deviation = EXACT
        """The worst so far."""
        self.limit = limit(spec)
        self.remark = ""
        """What a reader of the report should know of a trial that passed."""

    # Drawing.

    def randn(self, *shape: int) -> Tensor:
        """Normal float32 on the CPU, from the trial's own seed."""
        return torch.randn(shape, generator=self.generator)

    def exact(self, drawn: Tensor) -> Tensor:
        """Rounded to what both dtype and cache dtype hold."""
        rounded = drawn.to(self.spec.kv_dtype) if self.spec.kv_dtype.is_floating_point else drawn
        return rounded.to(self.spec.dtype)

    def _draw_query(self, *shape: int) -> Tensor:
        return self.randn(*shape) * LOGIT_SPREAD / (self.spec.scale * math.sqrt(self.spec.head_size))

    def _draw_keys(self, tokens: int, draw: Draw | None = None) -> Tensor:
        shape = (self.spec.layers, tokens, self.spec.kv_heads, self.spec.head_size)
        return self.exact((draw or self.randn)(*shape)).double()

    def _draw_values(self, tokens: int) -> Tensor:
        return self._draw_keys(tokens)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.spec.dtype)

    # What core does where an fp8 cache has scales (`ScaledStage`), to all layers at once.

    def _asking(self, query: Tensor) -> Tensor:
        return query

    def _cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def _restored(self, layer: int, answer: Tensor) -> Tensor:
        return answer

    # Rows and steps.

    def row(self, length: int, prefix: Row | None = None, shared_blocks: int = 0, draw_keys: Draw | None = None) -> Row:
        """A sequence whose `length` tokens earlier steps have written; it may share the first blocks of another."""
        shared = shared_blocks * self.configuration.block_size
        row = Row(self._draw_keys(0), self._draw_values(0), [])
        if prefix is not None:
            row = Row(prefix.keys[:, :shared], prefix.values[:, :shared], prefix.blocks[:shared_blocks])
        self._grow(row, length - shared, draw_keys)
        key, value = (self._on_device(tensor[:, shared:]) for tensor in (row.keys, row.values))
        self.cache.write(*self._cached(key, value), self._last_slots(row, length - shared))
        self.rows.append(row)
        return row

    def _grow(self, row: Row, tokens: int, draw_keys: Draw | None) -> None:
        row.keys = torch.cat([row.keys, self._draw_keys(tokens, draw_keys)], dim=1)
        row.values = torch.cat([row.values, self._draw_values(tokens)], dim=1)
        while len(row.blocks) * self.configuration.block_size < len(row) + self.capabilities.spare_slots:
            row.blocks.append(self.cache.take())

    def _last_slots(self, row: Row, tokens: int) -> list[int]:
        size = self.configuration.block_size
        return [row.blocks[at // size] * size + at % size for at in range(len(row) - tokens, len(row))]

    def step(
        self,
        rows: Sequence[tuple[Row, int]],
        padding: int = 0,
        draw_query: Draw | None = None,
        draw_keys: Draw | None = None,
    ) -> Step:
        """Each row grows by its new tokens, those of one new token first; `padding` rows follow. Nothing is written."""
        rows = sorted(rows, key=lambda pair: pair[1] != 1)
        for row, tokens in rows:
            self._grow(row, tokens, draw_keys)
        new = tuple(tokens for _, tokens in rows)
        shape = (self.spec.layers, sum(new) + padding, self.spec.heads, self.spec.head_size)
        query = self._on_device((draw_query or self._draw_query)(*shape))
        asked = query.cpu().double()
        surplus = self._draw_keys(padding)
        key, value = self._cached(
            self._on_device(torch.cat([*(row.keys[:, len(row) - n :] for row, n in rows), surplus], dim=1)),
            self._on_device(torch.cat([*(row.values[:, len(row) - n :] for row, n in rows), surplus], dim=1)),
        )
        return Step(
            batch=self._batch(rows, padding),
            query=self._asking(query),
            key=key,
            value=value,
            truth=self._truth(rows, asked),
            new=new,
            contexts=tuple(len(row) for row, _ in rows),
            rows=tuple(row for row, _ in rows),
            asked=asked,
        )

    def _batch(self, rows: Sequence[tuple[Row, int]], padding: int) -> AttentionBatch:
        counts = [*(tokens for _, tokens in rows), *[1] * padding]
        contexts = [*(len(row) for row, _ in rows), *[0] * padding]
        slots = [slot for row, tokens in rows for slot in self._last_slots(row, tokens)]
        width = max((len(row.blocks) for row, _ in rows), default=0) + 2
        any_block = torch.randint(len(self.cache.pool), (len(counts), width), generator=self.generator)
        table = torch.tensor(self.cache.pool)[any_block]
        for filled, (row, _) in zip(table, rows, strict=False):
            filled[: len(row.blocks)] = torch.tensor(row.blocks)
        return AttentionBatch(
            query_starts=torch.tensor([0, *counts]).cumsum(0).to(self.device, torch.int32),
            context_lengths=torch.tensor(contexts).to(self.device, torch.int32),
            block_table=table.to(self.device, torch.int32),
            slots=torch.tensor([*slots, *[-1] * padding]).to(self.device, torch.int64),
            max_query=max(counts),
            max_context=max(contexts),
            decodes=next((index for index, count in enumerate(counts) if count != 1), len(counts)),
            host_lengths=self._on_the_host(counts, contexts),
        )

    def _on_the_host(self, counts: Sequence[int], contexts: Sequence[int]) -> HostLengths | None:
        """As the engine gives them, which does so nearly always; not to steps whose rows are a multiple of three."""
        if len(contexts) % 3 == 0:
            return None
        return HostLengths(np.cumsum([0, *counts], dtype=np.int32), np.array(contexts, dtype=np.int32))

    def _truth(self, rows: Sequence[tuple[Row, int]], query: Tensor) -> Tensor:
        truth, start = [query[:, :0]], 0
        for row, tokens in rows:
            own = query[:, start : start + tokens]
            sinks = self.sinks if self.sinks is not None else [None] * self.spec.layers
            layers = zip(own, row.keys, row.values, sinks, strict=True)
            truth.append(torch.stack([attention(*layer, spec=self.spec) for layer in layers]))
            start += tokens
        return torch.cat(truth, dim=1)

    # Answers.

    def write(self, step: Step) -> None:
        """Put the step's keys and values into the cache, as core does before each layer's `attend`."""
        self.cache.write(step.key, step.value, step.batch.slots)

    def attend(self, step: Step, plan: Any, layers: Sequence[int] | None = None) -> list[Tensor]:
        """The backend's answer for each layer, asked for in the order of `layers`."""
        answers = {
            layer: self.backend.attend(
                step.query[layer], step.key[layer], step.value[layer], self.cache.cache, plan, layer
            )
            for layer in layers or range(self.spec.layers)
        }
        return [answers[layer] for layer in range(self.spec.layers)]

    def check(self, step: Step, answers: list[Tensor]) -> None:
        """Compare with the truth; padding tokens need only be finite. Raises Fault with the row at fault."""
        for layer, answer in enumerate(answers):
            check_form(step.query[layer], answer)
            answer = self._restored(layer, answer)
            start = 0
            for row, (new, context) in enumerate(zip(step.new, step.contexts, strict=True)):
                own = slice(start, start + new)
                found = deviation(answer[own], step.truth[layer, own])
                self.deviation = self.deviation.worse(found)
                where = f"layer {layer}, row {row} ({new} new of {context} tokens)"
                judge(found, self.limit, where, partial(self._explain, step, answer[own], layer, row, own))
                start += new
            if not answer[start:].isfinite().all():
                raise Fault(f"layer {layer}: the output of padding rows is not finite")

    def _explain(self, step: Step, answer: Tensor, layer: int, row: int, own: slice) -> str:
        context, held = step.contexts[row], step.rows[row]
        asked = Asked(
            query=step.asked[layer, own],
            keys=held.keys[layer, :context],
            values=held.values[layer, :context],
            sinks=None if self.sinks is None else self.sinks[layer].double(),
            spec=self.spec,
            truths=step.truth[layer],
            own=own,
        )
        return explain(answer, asked)

    def run(self, step: Step, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Write, plan, attend and check, as one step of the engine does; the answers come back."""
        self.write(step)
        batch, before = step.batch, self.cache.snapshot()
        given = [
            step.query,
            step.key,
            step.value,
            batch.query_starts,
            batch.context_lengths,
            batch.block_table,
            batch.slots,
        ]
        copies = [tensor.clone() for tensor in given]
        answers = self.attend(step, self.backend.plan(batch), layers)
        self.cache.check_unchanged(before)
        if not all(map(torch.equal, given, copies)):
            raise Fault("plan or attend has changed a tensor that it was given")
        self.check(step, answers)
        return answers


def check_form(query: Tensor, answer: Tensor) -> None:
    """Shape, dtype and device of an output are those of its query. Raises Fault."""
    for what in ("shape", "dtype", "device"):
        if getattr(answer, what) != getattr(query, what):
            raise Fault(f"the output's {what} is {getattr(answer, what)}, it must be {getattr(query, what)}")
