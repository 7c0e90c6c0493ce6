"""What a backend can tell of hardware that is not here: kernels that are compiled for it ahead of time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What one kernel takes of its target."""

    kernel: str
    configuration: str
    """The first of those that need it."""
    registers: int
    """Of a thread, 32 bits each; on AMD's GPUs vector registers, accumulation registers among them."""
    scalar_registers: int | None = None
    """Of a wave, where the target has such."""
    shared_bytes: int
    """Of a program: shared memory, LDS."""
    scratch_bytes: int
    """Of a thread: memory in the place of registers that there are not."""
    programs: int
    """Side by side on a processor (SM, compute unit): registers, shared memory and waves allow no more."""
    warps: int
    code_bytes: int
    compile_seconds: float
    """When it was compiled: a kernel from the cache keeps its time."""
    matrix_instructions: int
    """In its code: those of the matrix unit ..."""
    wide_loads: int
    """... those that load 16 bytes a thread, ..."""
    narrow_loads: int
    """... and those that load less than 4: keys or values one by one, where they lie apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What rows that decode take of a target, calculated: nothing was run."""

    read_bytes: int
    """Of keys and values; what parts of contexts give and are joined from is written and read beside them."""
    programs: int
    """That work on them, ..."""
    programs_per_processor: int
    """... so many side by side on a processor, ..."""
    turns: int
    """... and so often one after another on those that have most."""
    seconds: float
    """All bytes at the memory's published speed, and the last turn as long as the others: it cannot be faster."""


class AheadOfTime(ABC):
    """The kernels of one backend for one target."""

    product: str
    """What stands for the target, e.g. "MI300X"."""
    bytes_per_second: float
    """Of its memory, as published."""

    @abstractmethod
    def configurations(self, *, complete: bool) -> Sequence[str]:
        """Names of what layers may ask of it: every declared value at least once, or those that are most unlike."""

    @abstractmethod
    def compile(self, configuration: str, cache: Path) -> Sequence[CompiledKernel]:
        """The kernels of one configuration that no configuration before it needed.

        `cache`: a folder for what was compiled. Raises whatever the compiler does, and where a kernel takes more of a
        program's shared memory than there is.
        """

    @abstractmethod
    def expect(self, spec: AttentionSpec, block_size: int, contexts: Sequence[int], cache: Path) -> Expectation:
        """Of rows that decode behind contexts of so many tokens, one layer's attention; `cache` as for `compile`."""
