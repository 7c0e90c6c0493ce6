"""octavo kernels: what can be known of kernels without the hardware that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.bench.flags import JsonFile, show
from octavo.settings import Settings

app = typer.Typer(
    help="Kernels for hardware that need not be here: compile them, see what they take of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Targets = Annotated[
    list[str] | None,
    typer.Option("--target", help="A GPU, e.g. gfx942 or cuda:90. May be given several times. Default: all."),
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="FOLDER", help="Keeps what was compiled. Default: kernels in OCTAVO_CACHE."),
]


@app.callback()
def options() -> None:
    """Options of every command."""


@app.command("compile")
def compile_kernels(
    target: Targets = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A backend, NAME or PLATFORM/NAME. May be given several times. Default: all."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the configurations that are most unlike, not every declared value.")
    ] = False,
    configuration: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One as the table names it. May be given several times. Default: all."),
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="PART/PARTS", help="Compile a part of them, e.g. 2/4: several machines share them.")
    ] = "1/1",
    cache: Cache = None,
    json_path: JsonFile = None,
) -> None:
    """Compile attention kernels ahead of time, in every configuration that a model can make a backend choose.

    Exits with 1 if one does not compile, or takes more shared memory than its target has, with 130 when it was
    interrupted: then table and file have what was compiled until then.
    """
    from octavo.bench.ahead import Options, Shard, run
    from octavo.plugins import plugins

    options = Options(
        targets=target or (),
        attention=attention or (),
        complete=not quick,
        configurations=configuration or (),
        shard=Shard.read(shard),
        cache=cache or _cache(),
    )
    with Console(stderr=True).status("preparing") as status:
        report = run(options, status.update, plugins())
    show(report, json_path)
    faults = [row for row in report.rows if "fault" in row]
    for row in faults:
        typer.echo(f"octavo: {row['target']}, {row['backend']}, {row['configuration']}: {row['fault']}", err=True)
    if not report.rows and (empty := report.workload["shard"]):
        typer.echo(f"octavo: shard {empty}", err=True)
    if unfinished := report.workload["not whole"]:
        typer.echo(f"octavo: this is not all of it: {unfinished}", err=True)
        raise typer.Exit(130)
    if faults:
        raise typer.Exit(1)


@app.command()
def roofline(
    target: Targets = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A backend, NAME or PLATFORM/NAME. May be given several times. Default: all."),
    ] = None,
    cache: Cache = None,
    json_path: JsonFile = None,
) -> None:
    """What decoding cannot be faster than, calculated: bytes, programs side by side, turns. Nothing is measured."""
    from octavo.bench.roofline import run
    from octavo.plugins import plugins

    with Console(stderr=True).status("preparing") as status:
        report = run(target or (), attention or (), cache or _cache(), status.update, plugins())
    show(report, json_path)


def _cache() -> Path:
    return Settings().octavo_cache / "kernels"
