"""Cases about memory that a backend takes for itself: it is empty by luck alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from octavo.conformance import grids
from octavo.conformance.cases import decoding, mixture
from octavo.conformance.registry import case
from octavo.conformance.stage import Stage, Step


@case(grids.plain_and_together)
def dirty_workspace(stage: Stage) -> None:
    """Memory that the backend takes holds NaN at first, and then what a longer step has left."""
    made, size = stage.backend, stage.configuration.block_size
    with uninitialised_is_nan():
        stage.backend = type(made)(stage.spec, size, made.device, sinks=made.sinks)
    _run(stage, stage.step([(stage.row(length), 1) for length in (150, 90, 40, 2)]))
    _run(stage, stage.step(decoding(stage)[:2], padding=3))
    _run(stage, stage.step([], padding=4))
    _run(stage, stage.step(mixture(stage)))
    _run(stage, stage.step([(stage.rows[0], 0), (stage.rows[-1], 1)]))


def _run(stage: Stage, step: Step) -> None:
    stage.write(step)
    with uninitialised_is_nan():
        answers = stage.attend(step, stage.backend.plan(step.batch))
    stage.check(step, answers)


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """While it lasts, PyTorch fills what `torch.empty` gives: integers with their largest."""
    deterministic: Any = torch.utils.deterministic  # a module that has a property
    before, filled = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether an operation is deterministic is not what is asked here
        torch.set_deterministic_debug_mode("warn")
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            deterministic.fill_uninitialized_memory = filled
