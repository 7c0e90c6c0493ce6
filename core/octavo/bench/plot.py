"""Latencies as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.bench.latency import MEASURES, Latency, Objectives, values

_TITLES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens", "e2e": "to the end"}


def draw(found: Sequence[Latency], objectives: Objectives | None, path: Path) -> None:
    """Which share of the requests took no longer, for each measure; a line where the objective is.

    Raises OSError without matplotlib, and ValueError for a file whose ending it does not know.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise OSError("a plot needs matplotlib: pip install 'octavo[bench]'") from None
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, measure in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
        if every := values(found, measure):
            axes.ecdf(every)
        if (limit := getattr(objectives, measure, None)) is not None:
            axes.axvline(limit, linestyle="--", color="grey")
        axes.set(title=_TITLES[measure], xlabel="seconds", ylabel="share", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.savefig(path)
