"""GPUs by the numbers that their makers publish: what a kernel must fit into, and what speeds can be expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One architecture, by the product that stands for it. `chips.json` of a backend has those that it knows."""

    architecture: str
    """E.g. "sm_90" or "gfx942"."""
    product: str
    maker: Literal["cuda", "hip"]
    """As Triton calls it."""
    warp_size: int
    """Threads of a warp, of a wave."""
    processors: int
    """SMs, compute units."""
    shared_bytes: int
    """Of shared memory (LDS) that one program may take ..."""
    processor_shared_bytes: int
    """... of so much that a processor has."""
    simds: int
    """Parts of a processor, each with registers of its own: ..."""
    registers: int
    """... so many for each thread of a warp, ..."""
    granule: int
    """... given out in such multiples, ..."""
    warps: int
    """... to so many warps at most."""
    programs: int
    """That a processor holds at most."""
    reserved_bytes: int = 0
    """Of shared memory, that each program takes beside its own."""
    bytes_per_second: float
    """Of memory, as published; what can be reached is less."""
    source: str
    """Where the numbers are from."""

    @property
    def capability(self) -> int:
        """The major number of an NVIDIA GPU's; 0 for others."""
        return int(self.architecture.removeprefix("sm_")) // 10 if self.maker == "cuda" else 0


@cache
def chips(table: Path) -> Mapping[str, Chip]:
    """Those of a backend, by architecture."""
    held = json.loads(table.read_text(encoding="utf-8"))
    return {architecture: Chip(architecture=architecture, **facts) for architecture, facts in held.items()}
