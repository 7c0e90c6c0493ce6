"""Cases about promises: what is declared and what is not, and independence of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from octavo.attention.check import check_backend
from octavo.attention.contract import AttentionBatch, Capabilities
from octavo.conformance import configuration as grids
from octavo.conformance.cases import mixture
from octavo.conformance.dirty import bits
from octavo.conformance.registry import case
from octavo.conformance.stage import Stage, Step
from octavo.conformance.truth import Fault

UNDECLARED: tuple[tuple[str, Any], ...] = (
    ("dtype", torch.float64),
    ("kv_dtype", torch.float64),
    ("head_size", 3),
    ("head_size", 100_000),
    ("block_size", 7919),
    ("window", 5),
    ("softcap", 2.0),
    ("sinks", True),
)
"""Fields of a configuration, with values that a backend may not have declared."""


@case(grids.once)
def declaration(stage: Stage) -> None:
    """The class states what the contract asks for, and what it declares makes sense."""
    backend, declared = type(stage.backend), stage.capabilities
    try:
        check_backend(backend)
    except (TypeError, ValueError) as error:
        raise Fault(str(error)) from error
    for fault in _senseless(declared):
        raise Fault(fault)
    for refusal in declared.refusals(stage.spec, stage.configuration.block_size):
        raise Fault(f"it refuses what it declares: {refusal}")


def _senseless(declared: Capabilities) -> Iterator[str]:
    """What no backend can mean."""
    unknown = declared.features - {"window", "softcap", "sinks"}
    if unknown:
        yield f"features {', '.join(sorted(unknown))} are not known: window, softcap, sinks"
    if declared.graphs not in ("none", "decode", "all"):
        yield f"graphs is {declared.graphs!r}: none, decode or all"
    if declared.spare_slots < 0:
        yield f"spare_slots is {declared.spare_slots}, it must be at least 0"


@case(grids.once)
def undeclared_is_refused(stage: Stage) -> None:
    """Dtypes, sizes and features that are not declared are refused."""
    declared = stage.capabilities
    for field, value in UNDECLARED:
        asked = replace(stage.configuration, **{field: value})
        if not _declares(declared, field, value) and not declared.refusals(asked.spec, asked.block_size):
            raise Fault(f"{field} {value} is not declared, and not refused")


def _declares(declared: Capabilities, field: str, value: Any) -> bool:
    allowed: tuple[Any, ...] = getattr(declared, f"{field}s", ())
    return field in declared.features or value in allowed or ... in allowed


@case(grids.once)
def unknown_option(stage: Stage) -> None:
    """An option that the backend does not know is refused with a ValueError."""
    backend, options = stage.backend, {"no_such_option": "1"}
    try:
        type(backend)(stage.spec, stage.configuration.block_size, backend.device, options, backend.sinks)
    except ValueError:
        return
    raise Fault("an option named no_such_option was taken")


@case(grids.once, needs=lambda declared: declared.batch_invariant)
def batch_invariant(stage: Stage) -> None:
    """A row's output is bitwise the same alone and among others."""
    step = stage.step(mixture(stage))
    together = stage.run(step)
    starts = step.batch.query_starts.tolist()
    for row, new in enumerate(step.new):
        own = slice(starts[row], starts[row + 1])
        alone = _alone(step, row, own)
        for layer, answer in enumerate(stage.attend(alone, stage.backend.plan(alone.batch))):
            if not torch.equal(bits(answer), bits(together[layer][own])):
                raise Fault(f"layer {layer}, row {row} ({new} new tokens): other bits alone than in a batch")


def _alone(step: Step, row: int, own: slice) -> Step:
    batch, new = step.batch, step.new[row]
    alone = AttentionBatch(
        query_starts=batch.query_starts.new_tensor([0, new]),
        context_lengths=batch.context_lengths[row : row + 1],
        block_table=batch.block_table[row : row + 1],
        slots=batch.slots[own],
        max_query=new,
        max_context=step.contexts[row],
        decodes=int(new == 1),
    )
    return replace(step, batch=alone, query=step.query[:, own], key=step.key[:, own], value=step.value[:, own])
