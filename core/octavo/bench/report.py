"""A benchmark's result as a file, and as the table that is made from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.table import Table

from octavo.bench.columns import COLUMNS, WORDS
from octavo.bench.comparison import compared
from octavo.bench.machine import PLATFORMS, Fact, commit, machine, versions


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
        columns, rows = compared(self.rows) if self.bench == "kernels" else (COLUMNS[self.bench], self.rows)
        return [[heading for heading, _ in columns], *([show(row) for _, show in columns] for row in rows)]

    def markdown(self) -> str:
        """The table for a page, with a line on where the numbers come from."""
        headings, *lines = self.cells()
        rule = ["---" if heading in WORDS else "---:" for heading in headings]
        table = "\n".join(f"| {' | '.join(line)} |" for line in [headings, rule, *lines])
        return f"{table}\n\n{self.caption()}"

    def rich(self) -> Table:
        """The table for a terminal."""
        headings, *lines = self.cells()
        table = Table(title=f"octavo bench {self.bench}", title_justify="left", caption=self.caption())
        for heading in headings:
            words = heading in WORDS
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


_MARKED = re.compile(r"(<!-- table: ([\w.-]+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, folder: Path) -> str:
    """A page's text with each table between its marks made anew from the file in `folder` that the mark names."""

    def table(match: re.Match[str]) -> str:
        report = Report.read(folder / match[2])
        return f"{match[1]}{report.markdown()} [{match[2]}]({match[2]})\n{match[3]}"

    return _MARKED.sub(table, page)
