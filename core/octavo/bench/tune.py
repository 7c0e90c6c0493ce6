"""Which of the shapes that a backend offers is best on this device: each is measured on the same batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.attention.contract import AttentionBackend, AttentionSpec, Phase
from octavo.attention.device import Device
from octavo.attention.select import Selection
from octavo.bench.machine import Fact

logger = logging.getLogger(__name__)

Timed = Callable[[AttentionBackend, Any], float]
"""Seconds that a backend takes for a batch."""


def tuned(
    selection: Selection,
    spec: AttentionSpec,
    device: Device,
    batches: Mapping[Phase, Sequence[Any]],
    timed: Timed,
    progress: Callable[[str], None],
) -> list[dict[str, Fact]]:
    """A row for each shape that ran, by phase, the best first: how its times compare to the least of each batch.

    The backend without options is one of them.

    One that does not run, for lack of registers or shared memory, or computes something else, has no row, nor has a
    phase without batches. Raises ValueError where the backend offers none.
    """
    offered = selection.chosen.tunables
    if not any(offered.values()):
        raise ValueError(f"{selection.name} offers no shapes to choose from: leave out --tune")
    rows: list[dict[str, Fact]] = []
    for phase, shapes in offered.items():
        if not batches[phase]:
            continue
        taken: dict[int, list[float]] = {}
        tried: list[Mapping[str, int] | None] = [None, *shapes]
        for number, shape in enumerate(tried):
            progress(f"{selection.name}, {phase}: {number + 1} of {len(tried)}")
            try:
                backend = selection.build(spec, device, None if shape is None else {phase: dict(shape)})
                taken[number] = [timed(backend, batch) for batch in batches[phase]]
            except Exception as error:  # whatever a compiler says of a shape that the device has no room for
                logger.info("%s, %s %s does not run: %s", selection.name, phase, shape, error)
        least = [min(column) for column in zip(*taken.values(), strict=True)]
        ratios = {number: _mean(times, least) for number, times in taken.items()}
        rows += [
            {
                "backend": selection.name,
                "phase": phase,
                "options": _words(phase, tried[number]),
                "time_ratio": round(ratio, 4),
            }
            for number, ratio in sorted(ratios.items(), key=lambda one: one[1])
        ]
    return rows


def _words(phase: Phase, shape: Mapping[str, int] | None) -> str:
    return "as it is" if shape is None else msgspec.json.encode({phase: shape}).decode()


def _mean(times: Sequence[float], least: Sequence[float]) -> float:
    """Of the ratios, geometric: a batch counts as much as another, whatever it takes."""
    return math.prod(time / low for time, low in zip(times, least, strict=True)) ** (1 / len(times))
