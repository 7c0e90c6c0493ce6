"""`octavo conformance NAME`: every trial of one backend, played and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import Device
from octavo.attention.select import choose, choose_device
from octavo.conformance.registry import trials
from octavo.conformance.report import Report
from octavo.plugins import Plugins, plugins


def run(
    name: str,
    *,
    device: str | None = None,
    json_path: Path | None = None,
    only: str | None = None,
    seed: int = 0,
    installed: Plugins | None = None,
    console: Console | None = None,
) -> int:
    """Run the suite on the backend that `ATTENTION=name` means, and print a table.

    `device` is a name as in `DEVICE`, None the best that is available; `json_path` receives the report as well; `only`
    is a case's name, or one trial as a report names it. Returns the exit status: 0 all passed, 1 something failed,
    2 nothing could be run.
    """
    console = console or Console()
    installed = installed or plugins()
    try:
        where = choose_device(device or "auto", installed)
        backend = choose((), where, attention=name, plugins=installed).chosen
        report = play(backend, where, name=name, only=only, seed=seed, console=console)
    except ValueError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    report.print(console)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 1 if report.failures else 0


def play(
    backend: type[AttentionBackend],
    device: Device,
    *,
    name: str | None = None,
    only: str | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Report:
    """Play all trials, with progress on `console`. Raises ValueError when `only` names none."""
    chosen = trials(backend, device, only, seed)
    if not chosen:
        raise ValueError(
            f'no case or trial of {backend.qualified_name()} is called "{only}": name one as the table does'
        )
    with one_thread():
        shown = track(chosen, "conformance", console=console or Console(quiet=True), transient=True)
        outcomes = tuple((trial, trial.run()) for trial in shown)
    return Report(name or backend.qualified_name(), backend, device.name, seed, only, outcomes)


@contextmanager
def one_thread() -> Iterator[None]:
    """The shapes are small: several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
