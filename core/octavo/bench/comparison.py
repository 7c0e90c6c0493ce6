"""What octavo bench kernels shows: a line for each batch, with a column for each backend where there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from octavo.bench.columns import Columns, Row, number, scaled, word
from octavo.bench.machine import Fact

_BLOCK_SIZE = "block_size_tokens"


def backends(rows: Sequence[Row]) -> list[str]:
    """Those that were measured, in their order."""
    return list(dict.fromkeys(str(row["backend"]) for row in rows))


def varying(rows: Sequence[Row]) -> list[str]:
    """What tells rows of one backend and batch apart, of: heads, cache, dtype and block size."""
    found = [key for key in ("heads", "cache") if len({row.get(key) for row in rows}) > 1]
    caches = {(row.get("cache"), row.get("dtype")) for row in rows}
    found += ["dtype"] * (len(caches) > len({row.get("cache") for row in rows}))
    sizes = {(row["backend"], row.get(_BLOCK_SIZE)) for row in rows}
    return found + [_BLOCK_SIZE] * (len(sizes) > len(backends(rows)))


def compared(rows: Sequence[Row]) -> tuple[Columns, Sequence[Row]]:
    """The columns, and the rows that they show. What all rows share stands below the table, not in it."""
    names, told = backends(rows), varying(rows)
    shape = [(key, word(key)) for key in told if key != _BLOCK_SIZE]
    shape.append(("batch", word("batch")))
    if len(names) == 1 or _BLOCK_SIZE in told:
        shape.append(("block size", number(_BLOCK_SIZE)))
    if len(names) == 1:
        return [("backend", word("backend")), *shape, *_ALONE], rows
    times = [
        (f"{name}{_size(name, rows, told)}, µs", _time(name, [other for other in names if other != name]))
        for name in names
    ]
    return [*shape, *times, *_BEST], _lines(rows, (*told, "batch"))


def _size(name: str, rows: Sequence[Row], told: Sequence[str]) -> str:
    """A backend's own block size, where it has one and no column for it."""
    size = next(row.get(_BLOCK_SIZE) for row in rows if row["backend"] == name)
    return "" if _BLOCK_SIZE in told else f", blocks of {size}"


def _lines(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """One for each combination of what the keys name: under each backend's name its time, and the best rates of all."""
    lines: dict[tuple[Fact, ...], dict[str, Fact]] = {}
    for row in rows:
        shape = {key: row.get(key) for key in keys}
        line = lines.setdefault(tuple(shape.values()), {})
        line |= shape | {str(row["backend"]): row.get("attend_seconds", _FAILS)}
        for rate in ("floor_percent", "operations_per_second"):
            line[rate] = max(_numbers([line.get(rate), row.get(rate)]), default=None)
    return list(lines.values())


def _time(name: str, others: Sequence[str]) -> Callable[[Row], str]:
    """Of one backend, and in parentheses how many times the best other one's it is."""

    def show(row: Row) -> str:
        taken = row.get(name)
        if not isinstance(taken, float):
            return str(taken or "")
        best = min(_numbers(map(row.get, others)), default=None)
        return f"{1e6 * taken:,.1f}" + ("" if best is None else f" ({taken / best:.2f})")

    return show


def _numbers(values: Iterable[Fact]) -> list[float]:
    return [value for value in values if isinstance(value, int | float)]


_FAILS = "fails"
"""In the place of a time: why, the row's fault says."""
_ALONE: Columns = [
    ("µs", lambda row: _FAILS if "fault" in row else scaled("attend_seconds", 1e-6, 1)(row)),
    ("GB/s", scaled("bytes_per_second", 1e9, 0)),
    ("of the memory", number("floor_percent", 0, " %")),
    ("TFLOP/s", scaled("operations_per_second", 1e12, 0)),
]
_BEST: Columns = [
    ("best of the memory", number("floor_percent", 0, " %")),
    ("best TFLOP/s", scaled("operations_per_second", 1e12, 0)),
]
