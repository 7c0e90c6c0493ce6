"""Which cases catch which broken backend: the table of docs/conformance.md, and the command that makes it anew.

    python -m tests.conformance.table

runs every case on every broken backend, which takes minutes, and writes the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from rich.progress import track

from octavo.attention.device import CPU
from octavo.conformance.registry import CASES, Trial, trials
from tests.conformance import (  # noqa: F401  importing them registers faults
    faulty_biases,
    faulty_kernels,
    faulty_layouts,
    faulty_steps,
)
from tests.conformance.faults import FAULTS, Broken

__all__ = ["FAULTS"]

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_MARKED = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
_ROW = re.compile(r"^\| ([^|]+?) \| (all(?: but)?)?\s?((?:`[\w-]+`(?:, )?)*) \|$", re.MULTILINE)


def catching(broken: Broken) -> list[str]:
    """The cases that fail, in the order of the suite; of each as many trials as it takes."""
    found: dict[str, None] = {}
    for trial in trials(broken, CPU()):
        if trial.case.name not in found and fails(trial):
            found[trial.case.name] = None
    return list(found)


def fails(trial: Trial) -> bool:
    """Is the backend caught by it?"""
    return trial.run().result != "passed"


def written(caught: dict[str, list[str]]) -> str:
    """A line for each broken backend. Where most cases fail, those are named that do not."""
    lines = ["| broken on purpose | caught by |", "| --- | --- |"]
    for name, cases in caught.items():
        others = [case for case in CASES if case not in cases]
        if len(others) < len(cases):
            lines.append(f"| {name} | {f'all but {_quoted(others)}' if others else 'all'} |")
        else:
            lines.append(f"| {name} | {_quoted(cases)} |")
    return "\n".join(lines) + "\n"


def _quoted(cases: list[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases)


def read(page: str) -> dict[str, set[str]]:
    """What `written` wrote, from the page that holds it."""
    marked = _MARKED.search(page)
    found = {}
    for name, but, listed in _ROW.findall(marked[0] if marked else ""):
        cases = set(re.findall(r"`([\w-]+)`", listed))
        found[name] = set(CASES) - cases if but else cases
    return found


def main() -> None:
    """Run everything and write the page."""
    torch.set_num_threads(1)
    caught = {name: catching(broken) for name, (broken, _) in track(FAULTS.items(), "broken backends")}
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MARKED.sub(lambda match: match[1] + written(caught) + match[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()
