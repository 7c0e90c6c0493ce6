"""Results as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.columns import Row
from octavo.bench.comparison import backends, varying
from octavo.bench.latency import MEASURES, Latency, Objectives, values

_TITLES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens", "e2e": "to the end"}
_MARKERS = "os^Dv*Pp"
_OF_BLOCKS = {"block_size_tokens": "blocks of "}
_LABELS = {
    "B": {"xlabel": "keys and values that a decode step must read", "ylabel": "read in a second"},
    "FLOP": {"xlabel": "operations of a step of prompts", "ylabel": "done in a second"},
}


def draw(found: Sequence[Latency], objectives: Objectives | None, path: Path) -> None:
    """Which share of the requests took no longer, for each measure; a line where the objective is.

    Raises OSError without matplotlib, and ValueError for a file whose ending it does not know.
    """
    figure = _figure(10, 6)
    for axes, measure in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
        if every := values(found, measure):
            axes.ecdf(every)
        if (limit := getattr(objectives, measure, None)) is not None:
            axes.axvline(limit, linestyle="--", color="grey")
        axes.set(title=_TITLES[measure], xlabel="seconds", ylabel="share", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def roofline(rows: Sequence[Row], path: Path) -> None:
    """Of the rows of octavo bench kernels: bytes a second by the bytes that rows which decode must read, below what the
    memory gives; operations a second by the operations of prompts.

    Raises OSError without matplotlib, and ValueError for a file whose ending it does not know, or rows without times.
    """
    panels = {
        rate: measured
        for rate in ("bytes_per_second", "operations_per_second")
        if (measured := [row for row in rows if rate in row and row.get("phase") != "mixed"])
    }
    if not panels:
        raise ValueError("no row has a time that could be drawn")
    figure = _figure(6 * len(panels), 5)
    for axes, (rate, measured) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_rates(axes, measured, rate, backends(rows), varying(rows))
    told = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(told.values(), told.keys(), loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path)


def _draw_rates(axes: Any, rows: Sequence[Row], rate: str, names: Sequence[str], told: Sequence[str]) -> None:
    """A colour for each backend, a marker for each shape."""
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        shape = "".join(f", {_OF_BLOCKS.get(key, '')}{row.get(key)}" for key in told)
        speed, taken = (float(row[key] or 0) for key in (rate, "attend_seconds"))
        series.setdefault((str(row["backend"]), shape), []).append((speed * taken, speed))
    shapes = list(dict.fromkeys(shape for _, shape in series))
    for (name, shape), points in series.items():
        marker, color = _MARKERS[shapes.index(shape) % len(_MARKERS)], f"C{names.index(name)}"
        axes.plot(*zip(*points, strict=True), marker, color=color, label=name + shape, markersize=5, alpha=0.8)
    if rate == "bytes_per_second":
        ceiling = max(100 * float(row[rate] or 0) / float(row["floor_percent"] or 0) for row in rows)
        axes.axhline(ceiling, linestyle="--", color="grey", label="a reduction that only reads")
    unit = "B" if rate == "bytes_per_second" else "FLOP"
    axes.set(xscale="log", yscale="log", **_LABELS[unit])
    _ticks(axes.xaxis, unit)
    _ticks(axes.yaxis, f"{unit}/s")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(axis: Any, unit: str) -> None:
    """Of a logarithmic axis: 1, 2 and 5 of each power of ten, as 2 TB."""
    from matplotlib.ticker import EngFormatter, LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(EngFormatter(unit))
    axis.set_minor_locator(LogLocator(subs=range(1, 10)))
    axis.set_minor_formatter("")
    axis.set_tick_params(labelsize="small")


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise OSError("a plot needs matplotlib: pip install 'octavo[bench]'") from None
    return Figure(figsize=(width, height), layout="constrained")
