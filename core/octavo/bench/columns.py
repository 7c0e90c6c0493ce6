"""What each benchmark's table shows of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.bench.latency import PERCENTILES
from octavo.bench.machine import Fact

Row = Mapping[str, Fact]
Columns = Sequence[tuple[str, Callable[[Row], str]]]
"""A table's headings, each with what a row shows under it."""


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


def _side_by_side(row: Row) -> str:
    """Programs on a processor, and the warps of each."""
    return f"{row['programs']} of {row['warps']}" if "programs" in row else str(row.get("fault", ""))


WORDS = {
    "engine", "backend", "reservation", "where", "prompt", "batch", "heads", "dtype", "cache", "phase", "options",
    "target", "kernel", "configuration",
}  # fmt: skip
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
        ("heads", word("heads")),
        ("cache", word("cache")),
        ("phase", word("phase")),
        ("options", word("options")),
        ("time ratio", number("time_ratio", 3)),
    ],
    "compiled": [
        ("target", word("target")),
        ("backend", word("backend")),
        ("kernel", word("kernel")),
        ("configuration", word("configuration")),
        ("registers", number("registers")),
        ("scalar", number("scalar_registers")),
        ("shared", number("shared_bytes")),
        ("scratch", number("scratch_bytes")),
        ("programs", _side_by_side),
        ("matrix", number("matrix_instructions")),
        ("wide", number("wide_loads")),
        ("narrow", number("narrow_loads")),
        ("code", number("code_bytes")),
        ("s", number("compile_seconds", 1)),
    ],
    "roofline": [
        ("target", word("target")),
        ("backend", word("backend")),
        ("batch", word("batch")),
        ("MB read", scaled("read_bytes", 1e6, 1)),
        ("programs", number("programs")),
        ("a processor", number("programs_per_processor")),
        ("turns", number("turns")),
        ("calculated µs", scaled("calculated_seconds", 1e-6, 1)),
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
