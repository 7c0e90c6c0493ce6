"""Cases about captured graphs: a plan that is given again is safe to replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from octavo.attention.contract import AttentionBatch
from octavo.conformance import grids
from octavo.conformance.cases import lengths
from octavo.conformance.registry import case
from octavo.conformance.stage import Row, Stage, Step
from octavo.conformance.truth import Fault


class Capture:
    """A step recorded as a graph records it: later steps hand over new numbers in the same tensors, nothing else.

    Where the device cannot capture, replay is played: `attend` is called again with a shallow copy that was made of
    the plan at capture, so that tensors refreshed in place are seen, and plain attributes stay as they were.
    """

    def __init__(self, stage: Stage, step: Step, bucket: int) -> None:
        self.stage = stage
        self.plan = stage.backend.plan(step.batch, bucket)
        self.held = replace(step, query=step.query.clone(), key=step.key.clone(), value=step.value.clone())
        self.answers = stage.attend(self.held, self.plan)
        self._replay = self._record()

    def _record(self) -> Callable[[], None]:
        frozen = copy.copy(self.plan)

        def run() -> None:
            for answer, new in zip(self.answers, self.stage.attend(self.held, frozen), strict=True):
                answer.copy_(new)

        return self.stage.backend.device.capture(run) or run

    def replay(self, step: Step) -> list[Tensor]:
        """The answers to `step`, for which `plan` has given the same object as at capture."""
        for name in ("query", "key", "value"):
            getattr(self.held, name).copy_(getattr(step, name))
        self._replay()
        return self.answers


Steps = list[tuple[int, list[tuple[Row, int]]]]
"""For each step its bucket, and its rows with their new tokens."""


@case(grids.plain_and_together, needs=lambda declared: declared.graphs != "none")
def replay_decode(stage: Stage) -> None:
    """Captured decode steps of two sizes answer later ones: contexts grow and shrink, rows leave padding behind."""
    rows = [stage.row(length) for length in lengths(stage)[1:6]]
    longer = [*rows, stage.row(90)]
    sizes = [(8, rows), (3, rows[3:]), (8, longer), (8, rows[:2]), (3, rows[:3]), (8, rows), (8, [])]
    _replay(stage, [(bucket, [(row, 1) for row in own]) for bucket, own in sizes])


@case(grids.once, needs=lambda declared: declared.graphs == "all")
def replay_mixed(stage: Stage) -> None:
    """A captured step with prefills answers later steps of the same query lengths."""
    rows = [(stage.row(20), 1), (stage.row(40), 1), (stage.row(0), 9), (stage.row(0), 4)]
    later = [(stage.row(33), 1), (stage.row(7), 1), (stage.row(0), 9), (stage.row(0), 4)]
    _replay(stage, [(len(rows), rows), (len(later), later)])


def _replay(stage: Stage, steps: Steps) -> None:
    """Capture the first step of each bucket and play the others, each as `plan` says.

    Between them steps run that were not captured: what they leave in a workspace must not show. Raises Fault when no
    step may be replayed.
    """
    captured: dict[int, Capture] = {}
    replayed = 0
    stranger = stage.row(130)
    for bucket, rows in steps:
        step = stage.step(rows, padding=bucket - len(rows))
        stage.write(step)
        if bucket not in captured:
            captured[bucket] = Capture(stage, step, bucket)
            stage.check(step, captured[bucket].answers)
            stage.run(stage.step([(stranger, 1), (stage.row(0), 6)]))
        else:
            plan = stage.backend.plan(step.batch, bucket)
            same = plan is captured[bucket].plan
            stage.check(step, captured[bucket].replay(step) if same else stage.attend(step, plan))
            replayed += same
        _spoil(step.batch)
    if not replayed:
        raise Fault(f"graphs are declared ({stage.capabilities.graphs}), yet plan never gave the captured object again")


def _spoil(batch: AttentionBatch) -> None:
    """Core's tensors belong to one step: a plan that keeps them instead of copying reads nonsense in the next."""
    batch.context_lengths.fill_(1)
    batch.block_table.fill_(0)
    if batch.host_lengths is not None:
        batch.host_lengths.query_starts.fill(0)
        batch.host_lengths.context_lengths.fill(1)
