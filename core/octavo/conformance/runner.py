"""`octavo conformance NAME`: every trial of one backend, played and reported."""

from __future__ import annotations

import difflib
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
from octavo.bench.machine import Fact
from octavo.conformance.junit import junit
from octavo.conformance.registry import capabilities, lacking, trials
from octavo.conformance.report import Report
from octavo.plugins import Plugins, plugins


def run(
    name: str,
    *,
    device: str | None = None,
    only: str | None = None,
    seed: int = 0,
    bench: bool = False,
    json_path: Path | None = None,
    junit_path: Path | None = None,
    installed: Plugins | None = None,
    console: Console | None = None,
) -> int:
    """Run the suite on the backend that `ATTENTION=name` means, and print a table.

    `device` is a name as in `DEVICE`, None the best that is available; `only` is a case's name, or one trial as a
    report names it; `bench` measures a backend that is right; `json_path` and `junit_path` receive the report as well.
    Returns the exit status: 0 all passed, 1 something failed, 2 nothing could be run.
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
    if junit_path is not None:
        junit_path.write_bytes(junit(report))
    if json_path is not None:  # before anything is measured, which may fail
        json_path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    fast = _speed(backend, where, installed, console) if bench and not report.failures else []
    if json_path is not None and bench:
        json_path.write_text(json.dumps(report.to_dict() | {"speed": fast}, indent=2) + "\n", encoding="utf-8")
    return 1 if report.failures or any("fault" in row for row in fast) else 0


def _speed(
    backend: type[AttentionBackend], device: Device, installed: Plugins, console: Console
) -> list[dict[str, Fact]]:
    """A benchmark is not imported before it is wanted: most runs want none."""
    from octavo.conformance.speed import speed, table

    with console.status("measuring") as status:
        rows = speed(backend, device, installed, status.update)
    console.print(table(rows))
    return rows


def _named(backend: type[AttentionBackend], device: Device, wanted: str | None) -> str:
    """The trials with nearly that name, where a configuration was wanted, or all cases."""
    found = trials(backend, device)
    close = difflib.get_close_matches(wanted or "", list(map(str, found)), n=3) if "[" in (wanted or "") else []
    return f"perhaps {' or '.join(close)}" if close else ", ".join(dict.fromkeys(trial.case.name for trial in found))


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
            f'no case or trial of {backend.qualified_name()} is called "{only}": {_named(backend, device, only)}'
        )
    with one_thread():
        shown = track(chosen, "conformance", console=console or Console(quiet=True), transient=True)
        outcomes = tuple((trial, trial.run()) for trial in shown)
    absent = lacking(backend.capabilities, capabilities(backend, device))
    return Report(name or backend.qualified_name(), backend, device.name, seed, only, outcomes, absent)


@contextmanager
def one_thread() -> Iterator[None]:
    """The shapes are small: several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
