"""Attention backends alone: decoding beside what the memory gives, prompts in operations a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Phase
from octavo.attention.device import Device
from octavo.attention.select import Selection, choose, choose_device
from octavo.bench.device_time import read_bytes_per_second, seconds
from octavo.bench.machine import Fact, accelerator, machine
from octavo.bench.report import Report
from octavo.bench.tune import tuned
from octavo.plugins import plugins


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step."""

    name: str
    contexts: tuple[int, ...]
    """Tokens of each row, this step's among them."""
    new: tuple[int, ...]
    """This step's."""

    @classmethod
    def decodes(cls, rows: int, context: int) -> Batch:
        """Rows of one new token."""
        return cls(f"{rows} x {context}", (context,) * rows, (1,) * rows)

    @classmethod
    def prompts(cls, rows: int, length: int, behind: int = 0) -> Batch:
        """Rows of `length` new tokens, behind as many that were there before."""
        name = f"{rows} x {length}" + (f" behind {behind}" if behind else "")
        return cls(name, (behind + length,) * rows, (length,) * rows)


DECODES = [
    *(Batch.decodes(1, context) for context in (1024, 8192, 32768, 65536)),
    *(Batch.decodes(8, context) for context in (2048, 4096, 16384)),
    *(Batch.decodes(*shape) for shape in ((32, 2048), (32, 4096), (64, 8192), (256, 1024))),
    Batch("1 x 65536 with 63 x 512", (65536, *[512] * 63), (1,) * 64),
]
PREFILLS = [
    *(Batch.prompts(*shape) for shape in ((16, 1024), (4, 4096), (1, 16384), (1, 512, 8192), (1, 512, 65536))),
    Batch("4 x 1024 with 64 decodes of 2048", (*[2048] * 64, *[1024] * 4), (*[1] * 64, *[1024] * 4)),
]
SMALL = [Batch.decodes(1, 1024), Batch.decodes(8, 512), Batch.prompts(2, 128)]
"""For a device that has no such memory and speed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    attention: Sequence[str | None]
    """Backends as in `ATTENTION`; None: the best one."""
    device: str | None
    heads: int
    kv_heads: int
    head_size: int
    dtype: str | None
    kv_dtype: str | None
    block_size: int | None
    repeats: int
    tune: bool = False
    """Measure the shapes that the backends offer, rather than the one that they take."""


def run(options: Options, progress: Callable[[str], None]) -> Report:
    """Measure each backend on each batch. Raises BackendUnavailable or UnknownBackend with the reasons."""
    installed = plugins()
    device = choose_device(options.device or "auto", installed)
    dtype = options.dtype or ("float32" if device.torch_device.type == "cpu" else "bfloat16")
    kv_dtype = (options.kv_dtype or dtype).replace("fp8_", "float8_")
    for word in (dtype, kv_dtype):
        if not isinstance(getattr(torch, word, None), torch.dtype):
            raise ValueError(f"{word} is no dtype: bfloat16, float16, float32, or of the cache fp8_e4m3fn, fp8_e5m2")
    spec = AttentionSpec(
        layers=1, heads=options.heads, kv_heads=options.kv_heads, head_size=options.head_size,
        scale=options.head_size**-0.5, dtype=getattr(torch, dtype), kv_dtype=getattr(torch, kv_dtype),
    )  # fmt: skip
    rows: list[dict[str, Fact]] = []
    ceiling = read_bytes_per_second(device)
    batches = SMALL if device.torch_device.type == "cpu" else [*DECODES, *PREFILLS]
    for name in options.attention:
        selection = choose((spec,), device, attention=name, block_size=options.block_size, plugins=installed)

        def timed(backend: AttentionBackend, batch: Batch, selection: Selection = selection) -> float:
            captured = selection.capabilities.graphs != "none"
            return seconds(device, _attending(backend, batch, device), options.repeats, captured=captured)

        if options.tune:
            rows += tuned(selection, spec, device, by_phase(batches), timed, progress)
            continue
        backend = selection.build(spec, device)
        for batch in batches:
            progress(f"{selection.name}: {batch.name}")
            row: dict[str, Fact] = {"backend": selection.name, "batch": batch.name}
            row["block_size_tokens"] = selection.block_size
            rows.append(row | _measures(spec, batch, timed(backend, batch), ceiling))
    workload: dict[str, Fact] = {
        "device": _device_name(device),
        "heads": f"{spec.heads}/{spec.kv_heads} of {spec.head_size}",
        "dtype": dtype,
        "cache": kv_dtype,
        "memory read": f"{ceiling / 1e12:.2f} TB/s",
        "repeats": options.repeats,
    }
    where = machine() | accelerator(device.torch_device)
    return Report(bench="tuning" if options.tune else "kernels", machine=where, workload=workload, rows=rows)


def by_phase(batches: Sequence[Batch]) -> dict[Phase, list[Batch]]:
    """Those in which all rows decode, and those in which none does."""
    return {
        "decode": [batch for batch in batches if max(batch.new) == 1],
        "prefill": [batch for batch in batches if min(batch.new) > 1],
    }


def _device_name(device: Device) -> str:
    name: Any = getattr(getattr(torch, device.torch_device.type, None), "get_device_name", None)
    return device.name if name is None else str(name(device.torch_device))


def _measures(spec: AttentionSpec, batch: Batch, taken: float, ceiling: float) -> dict[str, Fact]:
    """Decoding is judged by the bytes of keys and values that it must read, prompts by 4 operations a pair and dim."""
    if max(batch.new) == 1:
        size = 2 * sum(batch.contexts) * spec.kv_heads * spec.head_size * spec.kv_dtype.itemsize
        return {
            "attend_seconds": taken,
            "bytes_per_second": size / taken,
            "floor_percent": 100 * size / ceiling / taken,
        }
    pairs = sum(new * context - new * (new - 1) // 2 for new, context in zip(batch.new, batch.contexts, strict=True))
    return {"attend_seconds": taken, "operations_per_second": 4 * pairs * spec.heads * spec.head_size / taken}


def _attending(backend: AttentionBackend, batch: Batch, device: Device) -> Callable[[], object]:
    """One layer's `attend`, planned, over a cache of random numbers in shuffled blocks."""
    spec, where = backend.spec, device.torch_device
    blocks = [-(-context // backend.block_size) for context in batch.contexts]
    cache = backend.layout.allocate(sum(blocks) + 1, where)
    _fill(backend, cache, sum(blocks) + 1, where)
    tokens = sum(batch.new)
    query = torch.randn(tokens, spec.heads, spec.head_size, device=where, dtype=spec.dtype)
    key = torch.randn(tokens, spec.kv_heads, spec.head_size, device=where, dtype=spec.dtype)
    plan = backend.plan(
        AttentionBatch(
            query_starts=torch.tensor([0, *batch.new]).cumsum(0).to(where, torch.int32),
            context_lengths=torch.tensor(batch.contexts, dtype=torch.int32, device=where),
            block_table=_shuffled(blocks).to(where, torch.int32),
            slots=torch.full((tokens,), -1, dtype=torch.int64, device=where),
            max_query=max(batch.new),
            max_context=max(batch.contexts),
            decodes=sum(new == 1 for new in batch.new),
        )
    )
    return lambda: backend.attend(query, key, key, cache, plan, 0)


def _shuffled(blocks: Sequence[int]) -> torch.Tensor:
    """[rows, most blocks]: each row's own, from all over the cache; block 0 is nobody's."""
    ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int64)
    ends = torch.tensor([0, *blocks]).cumsum(0).tolist()
    for row, (start, end) in enumerate(pairwise(ends)):
        table[row, : end - start] = ids[start:end]
    return table


def _fill(backend: AttentionBackend, cache: object, blocks: int, where: torch.device) -> None:
    """Random numbers in every slot: zeros would be faster on some chips."""
    for slots in _pieces(blocks * backend.block_size, where):
        shape = (len(slots), backend.spec.kv_heads, backend.spec.head_size)
        key, value = (torch.randn(shape, device=where, dtype=backend.spec.dtype) for _ in range(2))
        backend.layout.write(cache, 0, key, value, slots)


def _pieces(slots: int, where: torch.device) -> Iterator[torch.Tensor]:
    return iter(torch.arange(slots, device=where).split(1 << 16))
