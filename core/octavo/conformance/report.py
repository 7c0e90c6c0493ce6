"""What came of a run: a table with a line for each case, a line to repeat each failure, and JSON."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo import __version__
from octavo.attention.contract import AttentionBackend
from octavo.conformance.registry import CASES, Case, Outcome, Trial
from octavo.conformance.truth import EXACT

_TOLD = 3
"""Failures of one case that are told in full: the table and the files have them all."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of all trials of one backend."""

    name: str
    """As `octavo conformance` takes it."""
    backend: type[AttentionBackend]
    device: str
    seed: int
    only: str | None
    """The case or trial that was asked for; None: all."""
    outcomes: tuple[tuple[Trial, Outcome], ...]
    lacking: Mapping[str, Sequence[str]]
    """What was not tried, since the backend declares it for other devices alone: by field of `Capabilities`."""

    @property
    def failures(self) -> list[tuple[Trial, Outcome]]:
        """Those that did not pass."""
        return [(trial, outcome) for trial, outcome in self.outcomes if outcome.result != "passed"]

    def repeat(self, trial: Trial) -> str:
        """The command that runs this trial alone, with the same numbers."""
        return self._command(str(trial))

    def _command(self, case: str) -> str:
        options = ["--device", self.device, "--case", case, "--seed", str(self.seed)]
        return shlex.join(["octavo", "conformance", self.name, *options])

    def print(self, console: Console) -> None:
        """The table; below it why trials failed and the command that repeats each; a summary as the last line.

        Of a case that fails in many configurations the first few are told, and how to repeat all of them.
        """
        console.print(self._table())
        if self.lacking and self.only is None:
            which = "; ".join(f"{name} {', '.join(values)}" for name, values in self.lacking.items())
            console.print(f"not declared here: {which}", markup=False, highlight=False, soft_wrap=True)
        for trial, outcome in self.outcomes:
            if outcome.remark:
                console.print(f"{escape(str(trial))}: {escape(outcome.remark)}", highlight=False, soft_wrap=True)
        for case in dict.fromkeys(trial.case.name for trial, _ in self.failures):
            failed = [one for one in self.failures if one[0].case.name == case]
            for trial, outcome in failed[:_TOLD]:
                title = f"[bold red]{escape(str(trial))}[/], seed {trial.seed}"
                console.print(f"{title}: {escape(outcome.reason)}", highlight=False, soft_wrap=True)
                console.print(f"  {escape(self.repeat(trial))}", highlight=False, soft_wrap=True)
            if len(failed) > _TOLD:
                more = f"and {len(failed) - _TOLD} more of this case"
                console.print(f"  {more}: {escape(self._command(case))}", highlight=False, soft_wrap=True)
        console.print(self._summary())

    def _table(self) -> Table:
        table = Table(title=f"{self.backend.qualified_name()} on {self.device}", title_justify="left")
        table.add_column("case", no_wrap=True)
        table.add_column("configuration", overflow="fold")
        table.add_column("error", justify="right", no_wrap=True)
        table.add_column("limit", justify="right", no_wrap=True)
        table.add_column("result", no_wrap=True)
        for case in CASES.values():
            for row in self._lines(case):
                table.add_row(*row)
        return table

    def _lines(self, case: Case) -> Iterator[tuple[str, ...]]:
        """One line for all that passed, one for each that failed."""
        own = [(trial, outcome) for trial, outcome in self.outcomes if trial.case.name == case.name]
        passed = [(trial, outcome) for trial, outcome in own if outcome.result == "passed"]
        if self.only is None and not own:
            here = " here" if self.lacking and case.configurations(self.backend.capabilities) else ""
            yield case.name, "", "", "", f"[dim]not declared{here}[/]"
        if passed:
            worst = max(
                (outcome for _, outcome in passed),
                key=lambda outcome: outcome.deviation.error / (outcome.limit.error or 1),
            )
            which = str(passed[0][0].configuration) if len(passed) == 1 else f"{len(passed)} configurations"
            yield case.name, which, *_figures(worst), "[green]passed[/]"
        for trial, outcome in own:
            if outcome.result != "passed":
                yield case.name, str(trial.configuration), *_figures(outcome), f"[bold red]{outcome.result}[/]"

    def _summary(self) -> str:
        cases = len({trial.case.name for trial, _ in self.outcomes})
        seconds = sum(outcome.seconds for _, outcome in self.outcomes)
        what = f"{len(self.outcomes)} trials of {cases} cases in {seconds:.1f} s"
        failed = len(self.failures)
        return f"[bold red]{failed} of {what} failed[/]" if failed else f"[bold green]all of {what} passed[/]"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: rows of flat values, the unit in their names."""
        return {
            "conformance": self.backend.qualified_name(),
            "contract": self.backend.contract,
            "device": self.device,
            "machine": f"{platform.machine()}, {platform.system()}",
            "versions": {"octavo": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "seed": self.seed,
            "passed": not self.failures,
            "not_declared_here": dict(self.lacking),
            "rows": [self._row(trial, outcome) for trial, outcome in self.outcomes],
        }

    def _row(self, trial: Trial, outcome: Outcome) -> dict[str, Any]:
        finite = outcome.deviation.error != torch.inf
        return {
            "case": trial.case.name,
            "meaning": trial.case.meaning,
            "configuration": str(trial.configuration),
            "seed": trial.seed,
            "result": outcome.result,
            "reason": outcome.reason,
            "remark": outcome.remark,
            "relative_error": outcome.deviation.error if finite else None,
            "relative_error_limit": outcome.limit.error,
            "correlation": outcome.deviation.correlation if finite else None,
            "correlation_limit": outcome.limit.correlation,
            "seconds": round(outcome.seconds, 4),
            "repeat": self.repeat(trial),
        }


def _figures(outcome: Outcome) -> tuple[str, str]:
    """Error and limit; nothing where a case compares no numbers."""
    if outcome.deviation == EXACT:
        return "", ""
    return f"{outcome.deviation.error:.1e}", f"{outcome.limit.error:.0e}"
