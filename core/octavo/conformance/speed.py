"""How fast a backend that is right is: beside the reference, and beside what the device's memory gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from octavo.attention.contract import AttentionBackend, Capabilities
from octavo.attention.device import Device
from octavo.bench.columns import number, scaled, word
from octavo.bench.kernels import Options, run
from octavo.bench.machine import Fact
from octavo.conformance.grids import head_sizes
from octavo.plugins import Plugins

REFERENCE = "any/reference"
_BATCHES = ("1 x 8192", "32 x 4096", "4 x 4096")
"""For a device with a memory of its own: decoding alone and in a crowd, and prompts."""
_USUAL_HEAD = 128

Row = dict[str, Fact]


def speed(
    backend: type[AttentionBackend], device: Device, installed: Plugins, progress: Callable[[str], None]
) -> list[Row]:
    """A row for each batch: the backend's time, that of the reference divided by it, and the share of the bandwidth.

    Measured as `octavo bench kernels` does it, in turns and after each answer was compared. Raises BackendUnavailable
    where the reference cannot do it.
    """
    name = backend.qualified_name()
    report = run(_options(backend, device), progress, installed)
    of_reference = {row["batch"]: row.get("attend_seconds") for row in report.rows if row["backend"] == REFERENCE}
    own = [dict(row) for row in report.rows if row["backend"] == name]
    for row in own:
        theirs, taken = of_reference.get(row["batch"]), row.get("attend_seconds")
        if name != REFERENCE and isinstance(theirs, float) and isinstance(taken, float):
            row["times_the_reference"] = theirs / taken
    return own


def _options(backend: type[AttentionBackend], device: Device) -> Options:
    """The usual shape, as far as the backend declares it."""
    declared, on_cpu = backend.capabilities_on(device), device.torch_device.type == "cpu"
    usual = torch.float32 if on_cpu else torch.bfloat16
    dtype = usual if usual in declared.dtypes else declared.dtypes[0]
    kv_dtype = dtype if dtype in declared.kv_dtypes else declared.kv_dtypes[0]
    return Options(
        attention=tuple(dict.fromkeys((backend.qualified_name(), REFERENCE))),
        device=device.name,
        head_size=_head_size(declared),
        dtypes=(_word(dtype),),
        kv_dtypes=(_word(kv_dtype),),
        batches=() if on_cpu else _BATCHES,
        repeats=10 if on_cpu else 50,
    )


def _head_size(declared: Capabilities) -> int:
    """As near to the usual one as can be."""
    return min(head_sizes(declared), key=lambda size: abs(math.log2(size / _USUAL_HEAD)))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_COLUMNS: Sequence[tuple[str, Callable[[Any], str]]] = [
    ("batch", word("batch")),
    ("µs", scaled("attend_seconds", 1e-6, 1)),
    ("x reference", number("times_the_reference", 2)),
    ("GB/s", scaled("bytes_per_second", 1e9, 1)),
    ("of memory", number("floor_percent", 0, " %")),
    ("TFLOP/s", scaled("operations_per_second", 1e12, 2)),
]


def table(rows: Sequence[Row]) -> Table:
    """For a terminal. x reference: 2 is twice as fast; of memory: of the bytes a second that it gives to a reader."""
    title = "speed: nothing was measured"
    if rows:
        title = "speed: heads {heads}, cache {cache}, blocks of {block_size_tokens}".format_map(rows[0])
    shown = Table(title=title, title_justify="left")
    for heading, _ in _COLUMNS:
        shown.add_column(heading, justify="left" if heading == "batch" else "right")
    for row in rows:
        shown.add_row(*(show(row) for _, show in _COLUMNS))
    faults = [f"{row['batch']}: {row['fault']}" for row in rows if "fault" in row]
    shown.caption = "\n".join(faults) or None
    return shown
