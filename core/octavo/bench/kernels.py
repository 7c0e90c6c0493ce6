"""Attention backends alone: decoding beside what the memory gives, prompts in operations a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from octavo.attention.contract import AttentionBackend, AttentionSpec, Phase
from octavo.attention.device import Device
from octavo.attention.select import Selection, choose, choose_device
from octavo.attention.wish import BackendUnavailable
from octavo.bench import peers
from octavo.bench.batches import GRID, SMALL, Batch, chosen
from octavo.bench.device_time import in_turns, prepared, read_bytes_per_second
from octavo.bench.inputs import Inputs
from octavo.bench.machine import Fact, accelerator, machine
from octavo.bench.report import Report
from octavo.bench.tune import tuned
from octavo.hooks import PROJECT
from octavo.plugins import Plugins, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured: every backend with every shape, cache dtype and block size that it takes."""

    attention: Sequence[str | None] = (None,)
    """Backends as in `ATTENTION`, or peers; None: the best one."""
    device: str | None = None
    heads: Sequence[str] = ("32/8",)
    """Query heads and key heads."""
    head_size: int = 128
    dtypes: Sequence[str] = ()
    """None: bfloat16, on a CPU float32."""
    kv_dtypes: Sequence[str] = ()
    """Of the cache; none: as the dtype."""
    block_sizes: Sequence[int] = ()
    """None: each backend's own."""
    batches: Sequence[str] = ()
    """By name; none: those for the device."""
    only: str | None = None
    """decode, prefill or mixed."""
    repeats: int = 50
    tune: bool = False
    """Measure the shapes that the backends offer, rather than the one that they take."""


def run(options: Options, progress: Callable[[str], None], installed: Plugins | None = None) -> Report:
    """Measure each backend on each batch. Raises BackendUnavailable or UnknownBackend with the reasons.

    `installed`: those to choose from; None: what is installed, and peers.
    """
    installed = installed or Plugins([*entry_points(group=PROJECT), peers.ENTRY_POINT])
    device = choose_device(options.device or "auto", installed)
    specs = _specs(options, device)
    batches = chosen(SMALL if device.torch_device.type == "cpu" else GRID, options.batches, options.only)
    selections, left_out = _selections(options, specs, device, installed)
    ceiling = read_bytes_per_second(device)
    rows: list[dict[str, Fact]] = []
    for spec, selected in selections.items():
        if options.tune:
            rows += _tuned(selected, spec, device, batches, options.repeats, progress)
            continue
        for batch in batches:
            progress(f"{_heads(spec)}, {_cache(spec)}: {batch.name}")
            contenders = [(one, one.build(spec, device)) for one in selected]  # what captured steps keep is a batch's
            rows += _measured(contenders, Inputs(spec, batch, device.torch_device), device, options.repeats, ceiling)
    workload: dict[str, Fact] = {
        "device": _device_name(device),
        "heads": ", ".join(dict.fromkeys(map(_heads, specs))),
        "dtype": ", ".join(dict.fromkeys(_word(spec.dtype) for spec in specs)),
        "cache": ", ".join(dict.fromkeys(map(_cache, specs))),
        "memory read": f"{ceiling / 1e12:.2f} TB/s",
        "repeats": options.repeats,
        "left out": "; ".join(left_out) or None,
    }
    where = machine() | accelerator(device.torch_device)
    return Report(bench="tuning" if options.tune else "kernels", machine=where, workload=workload, rows=rows)


def _specs(options: Options, device: Device) -> list[AttentionSpec]:
    """Each pair of head counts with each dtype and cache. Raises ValueError for what is no pair or no dtype."""
    usual = "float32" if device.torch_device.type == "cpu" else "bfloat16"
    return [
        AttentionSpec(
            layers=1, heads=heads, kv_heads=kv_heads, head_size=options.head_size, scale=options.head_size**-0.5,
            dtype=_dtype(dtype), kv_dtype=_dtype(kv_dtype),
        )
        for heads, kv_heads in map(_pair, dict.fromkeys(options.heads))
        for dtype in dict.fromkeys(options.dtypes or [usual])
        for kv_dtype in dict.fromkeys(options.kv_dtypes or [dtype])
    ]  # fmt: skip


def _pair(heads: str) -> tuple[int, int]:
    query, _, key = heads.partition("/")
    if not (query.isdecimal() and key.isdecimal()):
        raise ValueError(f"heads {heads}: write query heads and key heads, such as 32/8")
    return int(query), int(key)


def _dtype(word: str) -> torch.dtype:
    dtype = getattr(torch, word.replace("fp8_", "float8_"), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{word} is no dtype: bfloat16, float16, float32, or of the cache fp8_e4m3fn, fp8_e5m2")
    return dtype


def _selections(
    options: Options, specs: Sequence[AttentionSpec], device: Device, installed: Plugins
) -> tuple[Mapping[AttentionSpec, list[Selection]], list[str]]:
    """Who is measured with each spec, and why others are left out: only where they can serve something else."""
    found: dict[AttentionSpec, list[Selection]] = {spec: [] for spec in specs}
    left_out: list[str] = []
    for name in dict.fromkeys(options.attention):
        refused = []
        asked = list(itertools.product(specs, dict.fromkeys(options.block_sizes) or [None]))
        for spec, size in asked:
            try:
                found[spec].append(choose((spec,), device, attention=name, block_size=size, plugins=installed))
            except BackendUnavailable as error:
                refused.append(error)
        if len(refused) == len(asked):
            raise refused[0]
        left_out += dict.fromkeys(str(error).splitlines()[0] for error in refused)
    return found, left_out


def _measured(
    contenders: Sequence[tuple[Selection, AttentionBackend]],
    inputs: Inputs,
    device: Device,
    repeats: int,
    ceiling: float,
) -> list[dict[str, Fact]]:
    """A row for each; one whose answer is wrong, or that fails, has a fault and no time."""
    spec, batch = inputs.spec, inputs.batch
    rows: list[dict[str, Fact]] = []
    ready: list[tuple[dict[str, Fact], Callable[[], None]]] = []
    for selection, backend in contenders:
        row: dict[str, Fact] = {"backend": selection.name, "batch": batch.name, "phase": batch.kind}
        row |= {"heads": _heads(spec), "dtype": _word(spec.dtype), "cache": _cache(spec)}
        row |= {"block_size_tokens": selection.block_size}
        rows.append(row)
        try:
            replay, row["error_ratio"] = _checked(inputs, backend, device)
            ready.append((row, replay))
        except Exception as error:  # whatever a kernel of somebody's says of a batch: the others are measured
            row["fault"] = describe(error)
    for (row, _), taken in zip(ready, in_turns(device, [replay for _, replay in ready], repeats), strict=True):
        row |= _measures(spec, batch, taken, ceiling)
    return rows


def _checked(inputs: Inputs, backend: AttentionBackend, device: Device) -> tuple[Callable[[], None], float]:
    """What is timed, and its error: that of a replay, so that nothing else is timed than what is right."""
    attending = inputs.attending(backend)
    replay = prepared(device, attending, captured=backend.capabilities_on(device).graphs != "none")
    replay()
    return replay, inputs.error(attending.answer)


def _tuned(
    selections: Sequence[Selection],
    spec: AttentionSpec,
    device: Device,
    batches: Sequence[Batch],
    repeats: int,
    progress: Callable[[str], None],
) -> list[dict[str, Fact]]:
    def timed(backend: AttentionBackend, batch: Batch) -> float:
        replay, _ = _checked(Inputs(spec, batch, device.torch_device), backend, device)
        return in_turns(device, [replay], repeats)[0]

    rows: list[dict[str, Fact]] = []
    for selection in selections:
        found = tuned(selection, spec, device, by_phase(batches), timed, progress)
        shape: dict[str, Fact] = {"heads": _heads(spec), "cache": _cache(spec)}
        rows += [row | shape | {"block_size_tokens": selection.block_size} for row in found]
    return rows


def by_phase(batches: Sequence[Batch]) -> dict[Phase, list[Batch]]:
    """Those in which all rows decode, and those in which none does."""
    phases: tuple[Phase, ...] = ("decode", "prefill")
    return {phase: [batch for batch in batches if batch.kind == phase] for phase in phases}


def _device_name(device: Device) -> str:
    name: Any = getattr(getattr(torch, device.torch_device.type, None), "get_device_name", None)
    return device.name if name is None else str(name(device.torch_device))


def _heads(spec: AttentionSpec) -> str:
    return f"{spec.heads}/{spec.kv_heads} of {spec.head_size}"


def _cache(spec: AttentionSpec) -> str:
    return _word(spec.kv_dtype)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measures(spec: AttentionSpec, batch: Batch, taken: float, ceiling: float) -> dict[str, Fact]:
    """Decoding is judged by the bytes of keys and values that it must read, prompts by 4 operations a pair and dim."""
    if batch.kind == "decode":
        size = 2 * sum(batch.contexts) * spec.kv_heads * spec.head_size * spec.kv_dtype.itemsize
        return {
            "attend_seconds": taken,
            "bytes_per_second": size / taken,
            "floor_percent": 100 * size / ceiling / taken,
        }
    pairs = sum(new * context - new * (new - 1) // 2 for new, context in zip(batch.new, batch.contexts, strict=True))
    return {"attend_seconds": taken, "operations_per_second": 4 * pairs * spec.heads * spec.head_size / taken}
