"""octavo bench kernels: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.bench.flags import JsonFile, show
from octavo.options import setting


def kernels(
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A backend, as in ATTENTION, or peer/fa3, peer/flashinfer, peer/dense. May be given several times."
        ),
    ] = None,
    device: Annotated[str | None, setting("device")] = None,
    heads: Annotated[
        list[str], typer.Option(metavar="QUERY/KEY", help="Query heads and key heads. May be given several times.")
    ] = ["32/8"],  # noqa: B006
    head_size: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Default: bfloat16, on a CPU float32. May be given several times.")
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="Of the cache. Default: as --dtype. May be given several times.")
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in a block. Default: each backend's own. May be given several times."),
    ] = None,
    batch: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This batch alone, such as '1 x 8192'; or several.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="KIND", help="Batches of one kind alone: decode, prefill or mixed.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each batch, of which the median counts.")] = 50,
    tune: Annotated[
        bool, typer.Option("--tune", help="Instead: the shapes of tiles that the backend offers, the best first.")
    ] = False,
    json_path: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed by size, and the memory's: .svg, .png, .pdf.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show what --json wrote.")
    ] = None,
) -> None:
    """Attention alone: decoding beside what the memory gives, prompts in operations a second.

    Backends are measured in turns on the same numbers, each after its answer was compared with attention in float64.
    """
    from octavo.bench.kernels import Options, run
    from octavo.bench.report import Report

    if tune and plot is not None:
        raise ValueError("a plot is of times, and --tune gives ratios: leave out one of them")
    if read is not None:
        report = Report.read(read)
    else:
        options = Options(
            attention=attention or [None],
            device=device,
            heads=heads,
            head_size=head_size,
            dtypes=dtype or (),
            kv_dtypes=kv_cache_dtype or (),
            block_sizes=block_size or (),
            batches=batch or (),
            only=only,
            repeats=repeats,
            tune=tune,
        )
        with Console(stderr=True).status("preparing") as status:
            report = run(options, status.update)
    show(report, json_path)
    if plot is not None:
        from octavo.bench.plot import roofline

        roofline(report.rows, plot)
    faults = [row for row in report.rows if "fault" in row]
    for row in faults:
        typer.echo(f"octavo: {row['backend']}, {row['batch']}: {row['fault']}", err=True)
    if faults:
        raise typer.Exit(1)
