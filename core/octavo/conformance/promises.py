"""Cases about promises: what is declared and what is not, and bits that nothing else in a batch changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from octavo.attention.check import check_backend
from octavo.attention.contract import Capabilities, Feature
from octavo.attention.phases import parts
from octavo.conformance import grids
from octavo.conformance.dirty import bits
from octavo.conformance.registry import case, lacking
from octavo.conformance.stage import Row, Stage, Step
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
    ("alibi", True),
    ("batch_invariant", True),
)
"""Fields of a configuration, with values that a backend may not have declared."""


@case(grids.once)
def declaration(stage: Stage) -> None:
    """The class states what the contract asks for, and what it declares makes sense."""
    declared = stage.capabilities
    try:
        for backend in parts(type(stage.backend)):
            check_backend(backend)
    except (TypeError, ValueError) as error:
        raise Fault(str(error)) from error
    for fault in _senseless(declared):
        raise Fault(fault)
    for name, values in lacking(declared, type(stage.backend).capabilities).items():
        raise Fault(f"{name} {', '.join(values)}: declared for this device, and not at all")
    for refusal in declared.refusals(stage.spec, stage.configuration.block_size):
        raise Fault(f"it refuses what it declares: {refusal}")


def _senseless(declared: Capabilities) -> Iterator[str]:
    """What no backend can mean."""
    known = get_args(Feature)
    if unknown := declared.features - set(known):
        yield f"features {', '.join(sorted(unknown))} are not known: {', '.join(known)}"
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
    return field in declared.features or value in allowed or ... in allowed or getattr(declared, field, None) is True


@case(grids.once)
def unknown_option(stage: Stage) -> None:
    """An option that the backend does not know is refused with a ValueError."""
    backend, options = stage.backend, {"no_such_option": "1"}
    try:
        type(backend)(stage.spec, stage.configuration.block_size, backend.device, options, backend.sinks)
    except ValueError:
        return
    raise Fault("an option named no_such_option was taken")


@case(grids.invariant, needs=lambda declared: declared.batch_invariant)
def batch_invariant(stage: Stage) -> None:
    """Asked for, a token's bits are the same alone and among others, decoded or prefilled, in any chunks and blocks."""
    size = stage.configuration.block_size
    tokens = 2 * size + 60
    first, second = stage.row(0), stage.row(0)
    step = stage.step([(first, tokens)])
    (whole,) = stage.run(step)
    others = [(stage.row(size), 1), (stage.row(0), 1), (stage.row(0), 9)]
    ways = [(others, [tokens])]
    if stage.capabilities.prefix_caching:
        ways += [(others, [5, 1, size, 1, tokens - size - 7]), ([], [tokens - 34, 33, 1])]
    for company, chunks in ways:
        second.blocks.reverse()
        row, start = Row(first.keys[:, :0], first.values[:, :0], second.blocks), 0
        for chunk in chunks:
            own = slice(start, start + chunk)
            if not torch.equal(bits(_again(stage, step, row, own, company)), bits(whole[own])):
                how = f"{'among others' if company else 'alone'}, in chunks of {', '.join(map(str, chunks))}"
                raise Fault(f"tokens {start} to {start + chunk - 1} have other bits {how}, than alone in one chunk")
            start += chunk


def _again(stage: Stage, whole: Step, row: Row, own: slice, others: Sequence[tuple[Row, int]]) -> Tensor:
    """What the backend gives these tokens of `whole`, whose earlier ones `row` has, among others and padding."""
    new = own.stop - own.start
    step = stage.step([*others, (row, new)], padding=len(others))
    # Rows of one token come first, and otherwise rows keep their order.
    before = sum(count for _, count in others if new > 1 or count == 1)
    there = slice(before, before + new)
    for name in ("query", "key", "value"):
        getattr(step, name)[:, there] = getattr(whole, name)[:, own]
    stage.write(step)
    (answer,) = stage.attend(step, stage.backend.plan(step.batch))
    return answer[there]
