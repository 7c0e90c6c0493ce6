"""Two backends as one: rows that decode go to the first, the rest of a batch to the other, over one cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities, HostLengths

if TYPE_CHECKING:
    from octavo.attention.device import Device

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class PhasedPlan:
    """One step's plans; a phase without rows has none."""

    tokens: int
    """Query tokens of the rows that decode: one each, at the front."""
    decode: Any
    prefill: Any


class PhasedBackend(AttentionBackend):
    """What `ATTENTION=prefill=NAME,decode=NAME` makes; `phased` gives the class for two backends."""

    contract = 1
    priority = -1
    prefill_type: ClassVar[type[AttentionBackend]]
    decode_type: ClassVar[type[AttentionBackend]]

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """`options` has a mapping for each phase that takes some: {"prefill": {...}, "decode": {...}}."""
        unknown = sorted(set(options or {}) - {"prefill", "decode"})
        if unknown:
            raise ValueError(f"options of two phases are given as prefill and decode, got {', '.join(unknown)}")
        differ = disagreement(self.prefill_type, self.decode_type, spec, block_size, device)
        if differ is not None:
            raise ValueError(differ)
        super().__init__(spec, block_size, device, None, sinks)
        of_phase = options or {}
        self.prefill = self.prefill_type(spec, block_size, device, of_phase.get("prefill"), sinks)
        self.decode = self.decode_type(spec, block_size, device, of_phase.get("decode"), sinks)
        if self.prefill.layout != self.decode.layout:
            raise ValueError(
                f"their options give the phases different layouts: {self.prefill.layout} and {self.decode.layout}"
            )
        self.layout = self.decode.layout
        self._captured: dict[int, PhasedPlan] = {}

    def workspaces(self) -> Sequence[Tensor]:
        """Of both phases."""
        return [*self.prefill.workspaces(), *self.decode.workspaces()]

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> PhasedPlan:
        """Plan each phase's rows. Replay of a step in which all rows decode is as safe as the decoding backend says."""
        decoding, rest = split(batch)
        plan = PhasedPlan(
            tokens=batch.decodes,
            decode=None if decoding is None else self.decode.plan(decoding, bucket),
            prefill=None if rest is None else self.prefill.plan(rest),
        )
        if bucket is None or rest is not None:
            return plan
        captured = self._captured.setdefault(bucket, plan)
        return captured if captured.decode is plan.decode else plan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: PhasedPlan, layer: int) -> Tensor:
        """As the contract says; each phase's tokens by its backend."""
        tokens = plan.tokens
        if tokens == query.shape[0]:
            return self.decode.attend(query, key, value, cache, plan.decode, layer)
        if tokens == 0:
            return self.prefill.attend(query, key, value, cache, plan.prefill, layer)
        decoded = self.decode.attend(query[:tokens], key[:tokens], value[:tokens], cache, plan.decode, layer)
        rest = self.prefill.attend(query[tokens:], key[tokens:], value[tokens:], cache, plan.prefill, layer)
        return torch.cat([decoded, rest])


def phased(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[PhasedBackend]:
    """The backend that prefills with one and decodes with the other."""

    class Phased(PhasedBackend):
        __doc__ = f"Prefills with {prefill.qualified_name()}, decodes with {decode.qualified_name()}."
        name = f"prefill={prefill.qualified_name()},decode={decode.qualified_name()}"
        platform = decode.platform
        caution = "; ".join(dict.fromkeys(filter(None, (prefill.caution, decode.caution)))) or None
        capabilities = _common(prefill.capabilities, decode.capabilities)
        layout_type = decode.layout_type
        prefill_type = prefill
        decode_type = decode

        @classmethod
        def qualified_name(cls) -> str:
            return cls.name

        @classmethod
        def probe(cls, device: Device) -> str | None:
            return prefill.probe(device) or decode.probe(device)

        @classmethod
        def capabilities_on(cls, device: Device) -> Capabilities:
            return _common(prefill.capabilities_on(device), decode.capabilities_on(device))

    return Phased


def parts(backend: type[AttentionBackend]) -> tuple[type[AttentionBackend], ...]:
    """The backends that plugins registered: those of two phases, or this one."""
    return (backend.prefill_type, backend.decode_type) if issubclass(backend, PhasedBackend) else (backend,)


def disagreement(
    prefill: type[AttentionBackend],
    decode: type[AttentionBackend],
    spec: AttentionSpec,
    block_size: int,
    device: Device,
) -> str | None:
    """Why the two cannot share a cache in blocks of this size, or None."""
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        refusals = backend.capabilities_on(device).refusals(spec, block_size)
        if refusals:
            return f"{phase}={backend.qualified_name()}: {'; '.join(refusals)}"
    if spec.batch_invariant:
        return "deterministic is asked for, and the two give a token different bits: name one backend for both phases"
    theirs = (prefill.layout_type(spec, block_size), decode.layout_type(spec, block_size))
    if theirs[0] == theirs[1]:
        return None
    return (
        f"{prefill.qualified_name()} and {decode.qualified_name()} cannot share a cache: "
        f"their layouts differ in blocks of {block_size} ({theirs[0]} and {theirs[1]})"
    )


def split(batch: AttentionBatch) -> tuple[AttentionBatch | None, AttentionBatch | None]:
    """The rows that decode and the rest, each None when empty: views, but for the second's query starts.

    `max_context` stays the whole batch's, since the host knows no closer bound.
    """
    rows = batch.decodes
    if rows == batch.rows:
        return batch, None
    if rows == 0:
        return None, batch
    host = batch.host_lengths
    decoding = replace(
        batch,
        query_starts=batch.query_starts[: rows + 1],
        context_lengths=batch.context_lengths[:rows],
        block_table=batch.block_table[:rows],
        slots=batch.slots[:rows],
        max_query=1,
        host_lengths=host and HostLengths(host.query_starts[: rows + 1], host.context_lengths[:rows]),
    )
    rest = replace(
        batch,
        query_starts=batch.query_starts[rows:] - rows,
        context_lengths=batch.context_lengths[rows:],
        block_table=batch.block_table[rows:],
        slots=batch.slots[rows:],
        decodes=0,
        host_lengths=host and HostLengths(host.query_starts[rows:] - rows, host.context_lengths[rows:]),
    )
    return decoding, rest


def _common(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both can; a query behind cached keys is the prefilling one's affair, a captured step the decoding one's.

    Not batch invariant: a token would have other bits decoded by the one than prefilled by the other.
    """
    return Capabilities(
        dtypes=_both(decode.dtypes, prefill.dtypes),
        kv_dtypes=_both(decode.kv_dtypes, prefill.kv_dtypes),
        head_sizes=_both(decode.head_sizes, prefill.head_sizes),
        block_sizes=_both(decode.block_sizes, prefill.block_sizes),
        features=decode.features & prefill.features,
        graphs="none" if decode.graphs == "none" else "decode",
        prefix_caching=prefill.prefix_caching,
        spare_slots=max(prefill.spare_slots, decode.spare_slots),
        chip=prefill.chip or decode.chip,
    )


def _both(first: tuple[Value, ...], second: tuple[Value, ...]) -> tuple[Value, ...]:
    """What both allow, in the first's order; `...` allows any."""
    return tuple(dict.fromkeys((*_allowed(first, second), *_allowed(second, first))))


def _allowed(values: Iterable[Value], by: tuple[Value, ...]) -> list[Value]:
    return [value for value in values if value in by or (... in by and value is not ...)]
