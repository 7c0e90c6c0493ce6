"""The cases, in the order in which they are run, and what one run of one is."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from octavo.attention.contract import AttentionBackend, Capabilities
from octavo.attention.device import Device
from octavo.conformance.configuration import Configuration
from octavo.conformance.scaled import ScaledStage
from octavo.conformance.stage import Stage
from octavo.conformance.truth import EXACT, Deviation, Fault
from octavo.plugins import describe

Grid = Callable[[Capabilities], Iterator[Configuration]]
Play = Callable[[Stage], None]
Result = Literal["passed", "failed", "error"]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a backend must do right, and the configurations in which it must."""

    name: str
    meaning: str
    play: Play
    """Raises Fault."""
    grid: Grid
    needs: Callable[[Capabilities], bool]
    """Is it declared?"""

    def configurations(self, capabilities: Capabilities) -> list[Configuration]:
        """None where the backend does not declare what the case is about."""
        return list(self.grid(capabilities)) if self.needs(capabilities) else []


CASES: dict[str, Case] = {}
"""Every case by its name."""


def case(grid: Grid, needs: Callable[[Capabilities], bool] = lambda _: True) -> Callable[[Play], Play]:
    """Register a function as a case: its name with hyphens, its docstring's first line as the meaning."""

    def register(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        CASES[name] = Case(name, (play.__doc__ or "").splitlines()[0], play, grid, needs)
        return play

    return register


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one trial."""

    result: Result
    """`error`: the backend has raised."""
    reason: str
    deviation: Deviation
    limit: Deviation
    seconds: float
    remark: str = ""
    """What a reader should know although it passed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One case in one configuration, on one backend and device. The same seed gives the same numbers anywhere."""

    case: Case
    configuration: Configuration
    backend: type[AttentionBackend]
    device: Device
    seed: int = 0

    def __str__(self) -> str:
        """E.g. `decode[fp32-4/2x64-b16-nan]`: what `--case` takes."""
        return f"{self.case.name}[{self.configuration}]"

    def stage(self) -> Stage:
        """A new backend object and a dirty cache."""
        seed = crc32(str(self).encode()) + self.seed
        stage = ScaledStage if self.configuration.scaled else Stage
        return stage(self.backend, self.configuration, self.device, seed)

    def run(self) -> Outcome:
        """Play the case; whatever the backend raises is an outcome too."""
        start, stage = time.perf_counter(), None
        result: Result = "passed"
        reason = ""
        try:
            stage = self.stage()
            self.case.play(stage)
        except Fault as fault:
            result, reason = "failed", str(fault)
        except Exception as error:
            result, reason = "error", f"{describe(error)} ({_place(error)})"
        seconds = time.perf_counter() - start
        if stage is None:
            return Outcome(result, reason, EXACT, EXACT, seconds)
        return Outcome(result, reason, stage.deviation, stage.limit, seconds, stage.remark)


def _place(error: Exception) -> str:
    """Where it was raised, in the last line that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"


def capabilities(backend: type[AttentionBackend], device: Device) -> Capabilities:
    """For that device; where the backend cannot run, all that it declares."""
    return backend.capabilities if backend.probe(device) else backend.capabilities_on(device)


def lacking(whole: Capabilities, part: Capabilities) -> Mapping[str, list[str]]:
    """What of the one is not in the other, by field."""
    found: dict[str, list[str]] = {}
    for name in ("dtypes", "kv_dtypes", "head_sizes", "block_sizes", "features"):
        there = set(getattr(part, name))
        found[name] = [_word(one) for one in getattr(whole, name) if there.isdisjoint((one, ...))]
    for name in ("graphs", "prefix_caching", "batch_invariant"):
        more, less = getattr(whole, name), getattr(part, name)
        found[name] = [str(more)] * (more not in (less, "none", False) and less != "all")
    return {name: values for name, values in found.items() if values}


def _word(value: object) -> str:
    return "any other" if value is ... else str(value).removeprefix("torch.")


def trials(backend: type[AttentionBackend], device: Device, only: str | None = None, seed: int = 0) -> list[Trial]:
    """Every trial that follows from what `backend` declares for `device`.

    `only`: a case's name, or one trial as `str` gives it.
    """
    able = capabilities(backend, device)
    found = [
        Trial(case, configuration, backend, device, seed)
        for case in CASES.values()
        for configuration in case.configurations(able)
        if not _refuses_pair(backend, configuration)
    ]
    return [trial for trial in found if only in (None, trial.case.name, str(trial))]


def _refuses_pair(backend: type[AttentionBackend], configuration: Configuration) -> bool:
    """Is it a cache of another dtype than the queries', which the layout does not take though it takes each alone?

    Core does not choose such a backend then, with the reason. All else that is declared must be taken.
    """
    if configuration.dtype == configuration.kv_dtype:
        return False
    try:
        backend.layout_type(configuration.spec, configuration.block_size)
    except ValueError:
        return True
    return False
