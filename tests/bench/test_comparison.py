"""The table and the picture of octavo bench kernels: each number stands where it belongs, in old files too."""

from pathlib import Path

import numpy
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.bench import plot
from octavo.bench.comparison import compared
from octavo.bench.machine import Fact

Rows = list[dict[str, Fact]]


def decode(backend: str, batch: str, seconds: float | None, **more: Fact) -> dict[str, Fact]:
    """A row of octavo bench kernels: 1e6 bytes are read, the memory gives 1e12 a second."""
    row: dict[str, Fact] = {"backend": backend, "batch": batch, "block_size_tokens": 16}
    rates = {} if seconds is None else {
        "attend_seconds": seconds, "bytes_per_second": 1e6 / seconds, "floor_percent": 1e-4 / seconds,
    }  # fmt: skip
    return row | rates | more


def prefill(backend: str, batch: str, seconds: float, **more: Fact) -> dict[str, Fact]:
    """1e9 operations are done."""
    return decode(backend, batch, None, attend_seconds=seconds, operations_per_second=1e9 / seconds, **more)


def table(rows: Rows) -> list[list[str]]:
    columns, lines = compared(rows)
    return [[heading for heading, _ in columns], *([show(line) for _, show in columns] for line in lines)]


def test_a_column_for_each_backend_beside_the_best_of_the_others() -> None:
    rows = [
        decode("a/x", "1 x 8", 2e-6), decode("b/y", "1 x 8", 4e-6), decode("c/z", "1 x 8", 8e-6),
        prefill("a/x", "1 x 9", 1e-3), decode("b/y", "1 x 9", None, fault="it is wrong"), prefill("c/z", "1 x 9", 5e-4),
    ]  # fmt: skip
    rows = [row | ({"block_size_tokens": 256} if row["backend"] == "c/z" else {}) for row in rows]
    assert table(rows) == [
        ["batch", "a/x, blocks of 16, µs", "b/y, blocks of 16, µs", "c/z, blocks of 256, µs", "best of the memory",
         "best TFLOP/s"],
        ["1 x 8", "2.0 (0.50)", "4.0 (2.00)", "8.0 (4.00)", "50 %", ""],
        ["1 x 9", "1,000.0 (2.00)", "fails", "500.0 (0.50)", "", "2"],
    ]  # fmt: skip


def test_what_differs_has_a_column_and_what_is_left_out_an_empty_place() -> None:
    shape = {"heads": "4/2 of 8", "cache": "bfloat16"}
    rows = [
        decode("a/x", "1 x 8", 2e-6, **shape), decode("a/x", "1 x 8", 1e-6, **shape, block_size_tokens=32),
        decode("b/y", "1 x 8", 4e-6, **shape), decode("a/x", "1 x 8", 1e-6, **(shape | {"cache": "float8_e4m3fn"})),
    ]  # fmt: skip
    assert table(rows) == [
        ["cache", "batch", "block size", "a/x, µs", "b/y, µs", "best of the memory", "best TFLOP/s"],
        ["bfloat16", "1 x 8", "16", "2.0 (0.50)", "4.0 (2.00)", "50 %", ""],
        ["bfloat16", "1 x 8", "32", "1.0", "", "100 %", ""],
        ["float8_e4m3fn", "1 x 8", "16", "1.0", "", "100 %", ""],
    ]


def test_dtypes_have_a_column_where_the_cache_does_not_tell_them() -> None:
    """Not where each has a cache of its own."""
    fp32, bf16, fp8 = ({"cache": "float32"}, {"cache": "bfloat16"}, {"cache": "float8_e5m2"})
    rows = [decode("a/x", "1 x 8", 2e-6, dtype=one["cache"], **one) for one in (fp32, bf16)]
    assert [row[:2] for row in table(rows)] == [["backend", "cache"], ["a/x", "float32"], ["a/x", "bfloat16"]]
    rows = [decode("a/x", "1 x 8", 2e-6, dtype=dtype, **fp8) for dtype in ("float32", "bfloat16")]
    assert [row[:2] for row in table(rows)] == [["backend", "dtype"], ["a/x", "float32"], ["a/x", "bfloat16"]]


def test_one_backend_alone_has_its_rates() -> None:
    rows = [decode("a/x", "1 x 8", 2e-6, heads="4/2 of 8"), decode("a/x", "1 x 8", None, fault="", heads="2/2 of 8")]
    assert table(rows) == [
        ["backend", "heads", "batch", "block size", "µs", "GB/s", "of the memory", "TFLOP/s"],
        ["a/x", "4/2 of 8", "1 x 8", "16", "2.0", "500", "50 %", ""],
        ["a/x", "2/2 of 8", "1 x 8", "16", "fails", "", "", ""],
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    made: list[Figure] = []

    def figure(width: float, height: float) -> Figure:
        made.append(Figure(figsize=(width, height), layout="constrained"))
        return made[-1]

    monkeypatch.setattr(plot, "_figure", figure)
    return made


def points(axes: Axes) -> dict[str, list[list[float]]]:
    """x and y of each series."""
    return {str(line.get_label()): numpy.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}


def test_the_picture(tmp_path: Path, figures: list[Figure]) -> None:
    """Bytes a second by bytes, and operations a second by operations; mixed steps are neither."""
    rows = [
        decode("a/x", "1 x 8", 2e-6), decode("b/y", "1 x 8", 4e-6), prefill("a/x", "1 x 9", 1e-3),
        prefill("a/x", "both", 1e-3, phase="mixed"), decode("b/y", "1 x 9", None, fault="it is wrong"),
    ]  # fmt: skip
    plot.roofline(rows, tmp_path / "k.png")
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    reading, computing = figures[0].axes
    assert (reading.get_xscale(), reading.get_yscale()) == ("log", "log")
    drawn, done = points(reading), points(computing)
    assert drawn["a/x"] == [[pytest.approx(1e6), pytest.approx(5e11)]]
    assert drawn["b/y"] == [[pytest.approx(1e6), pytest.approx(2.5e11)]]
    assert [y for _, y in drawn["a reduction that only reads"]] == [pytest.approx(1e12)] * 2
    assert done == {"a/x": [[pytest.approx(1e9), pytest.approx(1e12)]]}


def test_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has a time"):
        plot.roofline([decode("a/x", "1 x 8", None)], tmp_path / "k.png")
