"""What decoding takes of hardware that is not here, calculated from bytes and from what its kernel occupies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from octavo.attention.contract import AttentionSpec
from octavo.attention.installed import backends
from octavo.bench.ahead import compiler, found
from octavo.bench.batches import GRID
from octavo.bench.machine import Fact, versions
from octavo.bench.report import Report
from octavo.plugins import Plugins

_SPEC = AttentionSpec(
    layers=1, heads=32, kv_heads=8, head_size=128, scale=128**-0.5, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)


def run(
    targets: Sequence[str], attention: Sequence[str], cache: Path, progress: Callable[[str], None], installed: Plugins
) -> Report:
    """The decode batches of `octavo bench kernels`, for each backend and target in blocks of its own preferred size."""
    kinds = {one.kind.qualified_name(): one.kind for one in backends(installed)}
    chosen = found(targets, attention, installed)
    rows: list[dict[str, Fact]] = []
    for kernels in chosen:
        block_size = kinds[kernels.backend].capabilities.preferred_block_size
        for batch in (batch for batch in GRID if batch.kind == "decode"):
            progress(f"{kernels.target}, {kernels.backend}: {batch.name}")
            told = kernels.ahead.expect(_SPEC, block_size, batch.contexts, cache)
            rows.append(
                {
                    "target": kernels.target,
                    "backend": kernels.backend,
                    "batch": batch.name,
                    "block_size_tokens": block_size,
                    "read_bytes": told.read_bytes,
                    "programs": told.programs,
                    "programs_per_processor": told.programs_per_processor,
                    "turns": told.turns,
                    "calculated_seconds": told.seconds,
                }
            )
    products = {one.target: f"{one.ahead.product} at {one.ahead.bytes_per_second / 1e12:g} TB/s" for one in chosen}
    workload: dict[str, Fact] = {
        "calculated": "nothing was run on these GPUs",
        "memory as published": ", ".join(products.values()),
        "heads": f"{_SPEC.heads}/{_SPEC.kv_heads} of {_SPEC.head_size}",
        "cache": "bfloat16",
    }
    return Report(bench="roofline", versions=versions() | compiler(), workload=workload, rows=rows)
