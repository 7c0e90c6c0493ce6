"""Results as files and as tables, and the tables of the documentation against its files."""

import re
from pathlib import Path

import pytest

from octavo.bench.columns import COLUMNS
from octavo.bench.machine import Fact
from octavo.bench.report import Report, filled

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGES = sorted(DOCS.glob("*.md"))
RESULTS = sorted(DOCS.glob("*.json"))

UNITS = re.compile(
    r"(tokens|seconds|mb|percent|percent_of_cache|per_second|requests|steps|calls|preemptions|bytes|programs|processor|turns)"
)
PLAIN = re.compile(r"_ratio(_to_\w+)?(_min|_max)?$|^p_value$")


def units_are_named(rows: list[dict[str, Fact]]) -> bool:
    """Each number's name ends with what it counts, or says that it is a ratio or a probability."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    return all(PLAIN.search(name) or UNITS.fullmatch(_last(name)) for name in names)


def _last(name: str) -> str:
    name = name.removesuffix("_min").removesuffix("_max")
    match = re.search(r"(percent_of_cache|per_second|[a-z]+)$", name)
    return match[0] if match else ""


def report(rows: list[dict[str, Fact]]) -> Report:
    return Report(
        bench="waste",
        date="2030-01-31",
        machine={"cpu": "A Processor", "cores": 2, "memory_gb": 8.0, "load_average_1min": 0.1},
        versions={"octavo": "1.2"},
        commit="0123456789abcdef0123456789abcdef01234567-dirty",
        workload={"requests": 3, "lengths": "ShareGPT", "block_size": None},
        rows=rows,
    )


ROWS: list[dict[str, Fact]] = [
    {"reservation": "contiguous", "block_size_tokens": None, "unused_percent": 81.2345, "steps": 12345},
    {"reservation": "octavo", "block_size_tokens": 16, "unused_percent": 2.0, "running_requests": 8.0},
]

MARKDOWN = """\
| reservation | block size | reserved but unused | of the cache used | requests at once | to contiguous | to up front \
| steps | preempted | recomputed |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| contiguous |  | 81.23 % |  |  |  |  | 12,345 |  |  |
| octavo | 16 | 2.00 % |  | 8.0 |  |  |  |  |  |

2030-01-31: requests 3; lengths ShareGPT. A Processor, 2 cores, 8.0 GB, load 0.1 at the start; octavo 1.2; \
commit 0123456789ab-dirty."""


def test_a_table_as_markdown() -> None:
    assert report(ROWS).markdown() == MARKDOWN


def test_a_gpu_is_named_first() -> None:
    found = report(ROWS)
    found.machine |= {"gpu": "A Card", "gpu_memory_gb": 80.0, "driver": None, "cuda": "12.8", "triton": "3.6.0"}
    assert "ShareGPT. A Card, 80.0 GB, cuda 12.8, triton 3.6.0; A Processor, 2 cores" in found.caption()


def test_time_per_token_is_that_of_a_request_alone() -> None:
    shown = dict(COLUMNS["throughput"])["ms/token"]
    assert shown({"requests": 1, "wall_seconds": 2.0, "output_tokens": 512}) == "3.91"
    assert shown({"requests": 2, "wall_seconds": 2.0, "output_tokens": 512}) == ""
    assert shown({"requests": 1}) == ""


def test_a_file_gives_the_same_report(tmp_path: Path) -> None:
    report(ROWS).write(tmp_path / "waste.json")
    assert Report.read(tmp_path / "waste.json") == report(ROWS)


@pytest.mark.parametrize("value", ['{"nested": 1}', "[1, 2]"])
def test_rows_are_flat(tmp_path: Path, value: str) -> None:
    report(ROWS).write(tmp_path / "waste.json")
    text = (tmp_path / "waste.json").read_text().replace('"contiguous"', value)
    (tmp_path / "waste.json").write_text(text)
    with pytest.raises(ValueError, match=r"waste\.json is no result of a benchmark.*rows"):
        Report.read(tmp_path / "waste.json")


def test_a_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    report(ROWS).write(tmp_path / "waste.json")
    page = "before\n\n<!-- table: waste.json -->\nold\n<!-- end -->\n\nafter\n"
    new = f"before\n\n<!-- table: waste.json -->\n{MARKDOWN} [waste.json](waste.json)\n<!-- end -->\n\nafter\n"
    assert filled(page, tmp_path) == new
    assert filled(new, tmp_path) == new


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentations_tables_are_those_of_its_files(page: Path) -> None:
    """`octavo bench page` makes them anew."""
    text = page.read_text(encoding="utf-8")
    assert filled(text, DOCS) == text


def test_every_result_is_shown() -> None:
    shown = {name for page in PAGES for name in re.findall(r"<!-- table: (\S+) -->", page.read_text(encoding="utf-8"))}
    assert {path.name for path in RESULTS} == shown


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_their_units_and_their_origin(path: Path) -> None:
    found = Report.read(path)
    assert found.bench in {*COLUMNS, "kernels"}
    assert units_are_named(found.rows)
    assert found.commit
    assert found.machine["cpu"]
    assert found.versions.keys() >= {"python", "torch", "transformers", "octavo"}


@pytest.mark.parametrize(("name", "named"), [("wall_seconds", True), ("wall_time", False), ("speed_ratio_max", True)])
def test_a_name_without_a_unit_is_seen(name: str, named: bool) -> None:
    assert units_are_named([{name: 1.5, "backend": "reference"}]) is named
