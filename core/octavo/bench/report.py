"""A benchmark's result as a file, and as the table that is made from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.table import Table

from octavo.bench.latency import PERCENTILES
from octavo.bench.machine import PLATFORMS, Fact, commit, machine, versions

Row = Mapping[str, Fact]
Columns = Sequence[tuple[str, Callable[[Row], str]]]
"""A table's headings, each with what a row shows under it."""


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one benchmark found. Every value of a row is flat, and its name ends with its unit."""

    bench: str
    date: str = msgspec.field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    machine: dict[str, Fact] = msgspec.field(default_factory=machine)
    versions: dict[str, Fact] = msgspec.field(default_factory=versions)
    commit: str | None = msgspec.field(default_factory=commit)
    workload: dict[str, Fact]
    """What was run, option by option."""
    rows: list[dict[str, Fact]]

    @classmethod
    def read(cls, path: Path) -> Report:
        """From a file that `write` wrote. Raises ValueError, naming it, for any other."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no result of a benchmark: {error}") from None

    def write(self, path: Path) -> None:
        """As JSON, indented: results are kept beside the documentation, where changes to them are read."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def cells(self) -> list[list[str]]:
        """The table: its headings, then a line for each row."""
        columns = COLUMNS[self.bench]
        return [[heading for heading, _ in columns], *([show(row) for _, show in columns] for row in self.rows)]

    def markdown(self) -> str:
        """The table for a page, with a line on where the numbers come from."""
        headings, *lines = self.cells()
        rule = ["---" if heading in _WORDS else "---:" for heading in headings]
        table = "\n".join(f"| {' | '.join(line)} |" for line in [headings, rule, *lines])
        return f"{table}\n\n{self.caption()}"

    def rich(self) -> Table:
        """The table for a terminal."""
        headings, *lines = self.cells()
        table = Table(title=f"octavo bench {self.bench}", title_justify="left", caption=self.caption())
        for heading in headings:
            words = heading in _WORDS
            table.add_column(heading, justify="left" if words else "right", no_wrap=words)
        for line in lines:
            table.add_row(*line)
        return table

    def caption(self) -> str:
        """What was run, where and with what."""
        said = [f"{name.replace('_', ' ')} {value}" for name, value in self.workload.items() if value is not None]
        where = self.machine
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}: {'; '.join(said)}. {_accelerator(where)}{where['cpu']}, {where['cores']} cores, "
            f"{where['memory_gb']} GB, load {where['load_average_1min']} at the start; {software}; "
            f"commit {self.commit[:12] + self.commit[40:] if self.commit else 'unknown'}."
        )


def _accelerator(where: Mapping[str, Fact]) -> str:
    """To begin the machine with; nothing where a CPU was measured."""
    if "gpu" not in where:
        return ""
    software = [f"{name} {where[name]}" for name in ("driver", *PLATFORMS, "triton") if where.get(name) is not None]
    return ", ".join([str(where["gpu"]), f"{where['gpu_memory_gb']} GB", *software]) + "; "


def number(key: str, digits: int = 0, unit: str = "") -> Callable[[Row], str]:
    """A cell: one value, rounded; empty where the row has none."""

    def show(row: Row) -> str:
        value = row.get(key)
        return f"{value:,.{digits}f}{unit}" if isinstance(value, int | float) else ""

    return show


def spread(key: str, digits: int) -> Callable[[Row], str]:
    """A cell: a median with the least and the most, where they differ."""
    middle, low, high = (number(name, digits) for name in (key, f"{key}_min", f"{key}_max"))

    def show(row: Row) -> str:
        ends = (low(row), high(row))
        return middle(row) if ends[0] == ends[1] else f"{middle(row)} ({ends[0]} to {ends[1]})"

    return show


def milliseconds(key: str) -> Callable[[Row], str]:
    """A cell: seconds, as milliseconds."""

    return scaled(key, 1e-3, 1)


def scaled(key: str, unit: float, digits: int) -> Callable[[Row], str]:
    """A cell: a value in another unit, of which it has so many."""

    def show(row: Row) -> str:
        value = row.get(key)
        return f"{value / unit:,.{digits}f}" if isinstance(value, int | float) else ""

    return show


def _between(key: str) -> Callable[[Row], str]:
    """A cell: a median, in milliseconds, with the interval that it lies in."""
    middle, low, high = (milliseconds(f"{key}_{name}seconds") for name in ("", "low_", "high_"))
    return lambda row: f"{middle(row)} ({low(row)} to {high(row)})" if middle(row) else ""


def word(key: str) -> Callable[[Row], str]:
    """A cell: a name."""
    return lambda row: str(row.get(key) or "")


def ranks(measure: str, unit: float, digits: int) -> Callable[[Row], str]:
    """A cell: a measure's percentiles, in parts of a second of which `unit` make one."""

    def show(row: Row) -> str:
        found = [row.get(f"{measure}_p{rank}_seconds") for rank in PERCENTILES]
        return " / ".join(f"{unit * value:,.{digits}f}" for value in found if isinstance(value, int | float))

    return show


def _goodput(row: Row) -> str:
    rate = number("good_requests_per_second", 2)(row)
    return f"{rate} ({number('good_percent', 1, ' %')(row)})" if rate else ""


def _per_token(row: Row) -> str:
    """Of a request alone: several share their steps."""
    seconds, tokens = row.get("wall_seconds"), row.get("output_tokens")
    if row.get("requests") == 1 and isinstance(seconds, int | float) and isinstance(tokens, int):
        return f"{1000 * seconds / tokens:,.2f}"
    return ""


def _identical(row: Row) -> str:
    identical = row.get("identical_requests")
    return "" if identical is None else f"{identical} of {row['requests']}"


def _place(row: Row) -> str:
    """An operator stands below its place, set off from it."""
    return f"– {row['operator']}" if row.get("operator") else str(row["where"])


_WORDS = {"engine", "backend", "reservation", "where", "prompt", "batch", "phase", "options"}
"""Headings over words, which stand on the left."""

COLUMNS: dict[str, Columns] = {
    "throughput": [
        ("engine", word("engine")),
        ("requests", number("requests")),
        ("output tokens/s", spread("output_tokens_per_second", 1)),
        ("ratio", spread("output_tokens_per_second_ratio", 2)),
        ("seconds", number("wall_seconds", 2)),
        ("ms/token", _per_token),
        ("tokens in", number("prompt_tokens")),
        ("out", number("output_tokens")),
        ("steps", number("steps")),
        ("peak MB", number("peak_memory_mb")),
        ("same tokens", _identical),
        ("block size", number("block_size_tokens")),
        ("backend", word("backend")),
    ],
    "profile": [
        ("requests", number("requests")),
        ("where", _place),
        ("seconds", number("wall_seconds", 3)),
        ("share", number("share_percent", 1, " %")),
        ("calls", number("calls")),
    ],
    "serving": [
        ("engine", word("engine")),
        ("requests", number("requests")),
        ("output tokens/s", spread("output_tokens_per_second", 1)),
        ("ratio", spread("output_tokens_per_second_ratio", 3)),
        ("step ratio", spread("step_seconds_ratio", 3)),
        ("TTFT ms p50 / p90 / p99", ranks("ttft", 1000, 0)),
        ("TPOT ms", ranks("tpot", 1000, 0)),
        ("ITL ms", ranks("itl", 1000, 0)),
        ("E2E s", ranks("e2e", 1, 2)),
        ("good requests/s", _goodput),
        ("failed", number("failed_requests")),
    ],
    "serving-steps": [
        ("rows", number("running_requests")),
        ("octavo serve ms", milliseconds("served_step_seconds")),
        ("serve steps", number("served_steps")),
        ("octavo.LLM ms", milliseconds("engine_step_seconds")),
        ("LLM steps", number("engine_steps")),
        ("ratio", number("step_seconds_ratio", 3)),
    ],
    "waste": [
        ("reservation", word("reservation")),
        ("block size", number("block_size_tokens")),
        ("reserved but unused", number("unused_percent", 2, " %")),
        ("of the cache used", number("used_percent_of_cache", 1, " %")),
        ("requests at once", number("running_requests", 1)),
        ("to contiguous", number("running_requests_ratio_to_contiguous", 2)),
        ("to up front", number("running_requests_ratio_to_up_front", 2)),
        ("steps", number("steps")),
        ("preempted", number("preemptions")),
        ("recomputed", number("recomputed_tokens")),
    ],
    "tuning": [
        ("backend", word("backend")),
        ("phase", word("phase")),
        ("options", word("options")),
        ("time ratio", number("time_ratio", 3)),
    ],
    "kernels": [
        ("backend", word("backend")),
        ("batch", word("batch")),
        ("block size", number("block_size_tokens")),
        ("µs", scaled("attend_seconds", 1e-6, 1)),
        ("GB/s", scaled("bytes_per_second", 1e9, 0)),
        ("of the memory", number("floor_percent", 0, " %")),
        ("TFLOP/s", scaled("operations_per_second", 1e12, 0)),
    ],
    "tenants": [
        ("prompt", word("prompt")),
        ("requests", number("requests")),
        ("cached tokens", number("cached_tokens")),
        ("first token ms", milliseconds("first_token_seconds")),
        ("p90", milliseconds("first_token_p90_seconds")),
        ("difference ms, 95 %", _between("difference")),
        ("p", number("p_value", 4)),
    ],
}

_MARKED = re.compile(r"(<!-- table: ([\w.-]+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, folder: Path) -> str:
    """A page's text with each table between its marks made anew from the file in `folder` that the mark names."""

    def table(match: re.Match[str]) -> str:
        report = Report.read(folder / match[2])
        return f"{match[1]}{report.markdown()} [{match[2]}]({match[2]})\n{match[3]}"

    return _MARKED.sub(table, page)
