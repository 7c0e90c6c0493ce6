"""The steps that an engine made, in whichever process: a plugin that the process is given, and what it wrote down."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

import msgspec

from octavo.hooks import StepStats, hookimpl

_DISTRIBUTION = "octavo-bench-steps"
_FILE = "steps.jsonl"
ENOUGH = 3
"""Steps of a size, of either engine: a median of fewer says little."""


class StepTime(NamedTuple):
    """One step."""

    seconds: float
    """From scheduling to sampled tokens."""
    prefill_tokens: int
    decode_tokens: int


class Recorder:
    """The plugin."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    @hookimpl
    def octavo_step_finished(self, step: StepStats) -> None:
        """Write it down."""
        if self._file is None:
            path = Path(str(distribution(_DISTRIBUTION).locate_file(_FILE)))
            self._file = path.open("ab", buffering=0)
        line = msgspec.json.encode(StepTime(step.seconds, step.prefill_tokens, step.decode_tokens))
        self._file.write(line + b"\n")


recorder = Recorder()


@dataclass(frozen=True, slots=True)
class Record:
    """A folder that brings the plugin to every process with it on its path, and gathers what they write."""

    folder: Path

    def steps(self) -> list[StepTime]:
        """All so far."""
        file = self.folder / _FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [msgspec.json.decode(line, type=StepTime) for line in lines]


@contextmanager
def recorded() -> Iterator[Record]:
    """A new record, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        info = Path(folder) / f"{_DISTRIBUTION.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[octavo]\nsteps = {__name__}:recorder\n")
        yield Record(Path(folder))


class Size(NamedTuple):
    """Steps that decoded the same number of rows and nothing else, of two engines."""

    rows: int
    seconds: float
    """The median."""
    steps: int
    other_seconds: float
    other_steps: int

    @property
    def ratio(self) -> float:
        """How many times the other's."""
        return self.seconds / self.other_seconds


def by_size(steps: Sequence[StepTime], others: Sequence[StepTime]) -> list[Size]:
    """Of the sizes that both engines had often enough."""
    mine, theirs = _decoding(steps), _decoding(others)
    return [
        Size(rows, median(mine[rows]), len(mine[rows]), median(theirs[rows]), len(theirs[rows]))
        for rows in sorted(mine.keys() & theirs.keys())
        if min(len(mine[rows]), len(theirs[rows])) >= ENOUGH
    ]


def ratio(sizes: Sequence[Size]) -> float | None:
    """Of all sizes together, each with the weight of its time; None without any."""
    weights = [min(size.steps, size.other_steps) for size in sizes]
    mine = sum(weight * size.seconds for weight, size in zip(weights, sizes, strict=True))
    theirs = sum(weight * size.other_seconds for weight, size in zip(weights, sizes, strict=True))
    return mine / theirs if sizes else None


def _decoding(steps: Sequence[StepTime]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if not step.prefill_tokens:
            found[step.decode_tokens].append(step.seconds)
    return found
