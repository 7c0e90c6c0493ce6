"""A driver of Triton's for a GPU that is not here: what is launched is compiled, held against the GPU, and not run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from octavo_triton import launch
from octavo_triton.chips import Chip

_THREADS = 1024
"""Of a program, at most: all targets have the same limit."""
_numbers = count(1000)
"""Triton keeps kernels by the number of their device: each time it is another one, that nobody has."""


@dataclass(frozen=True, slots=True)
class Build:
    """What the compiler gave."""

    name: str
    """Behind that of its module: "decode.split"."""
    files: dict[str, Path]
    """By their suffix: "amdgcn", "hsaco", "ptx", "cubin", ..."""
    shared_bytes: int
    warps: int
    seconds: float
    hash: str


class _Absent:
    """As much of a driver as compiling and a launch ask for. Triton refuses a launch that takes too much of the GPU."""

    def __init__(self, chip: Chip) -> None:
        number = chip.architecture.removeprefix("sm_")
        arch = int(number) if chip.maker == "cuda" else chip.architecture
        self._target = GPUTarget(chip.maker, arch, chip.warp_size)
        self._device = next(_numbers)
        self.launcher_cls = lambda source, metadata: lambda *arguments: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": chip.shared_bytes},
            load_binary=lambda name, kernel, shared, device: (self, self, 0, 0, _THREADS),
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(chip: Chip, cache: Path, report: Callable[[Build], None]) -> Iterator[None]:
    """Within, launches compile for `chip`, and each kernel is reported once.

    `cache`: a folder that keeps what was compiled.
    """

    def compiled(*, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, **_: Any) -> None:
        files = {Path(path).suffix[1:]: Path(path) for path in metadata_group.values()}
        seconds = files["json"].with_name("seconds")
        if not seconds.exists():  # a kernel from the cache keeps its time
            own = seconds.with_name(f"seconds.{os.getpid()}")  # others who share the cache must not read half of it
            own.write_text(str(times.total / 1e6), encoding="utf-8")
            own.replace(seconds)
        taken = float(seconds.read_text(encoding="utf-8"))
        module = src.fn.__module__.rpartition(".")[2]
        report(
            Build(
                f"{module}.{metadata['name']}",
                files,
                metadata["shared"],
                metadata["num_warps"],
                taken,
                metadata["hash"],
            )
        )

    active = driver._active
    with knobs.cache.scope(), knobs.compilation.scope(), launch.on_capability(chip.capability):
        knobs.cache.dir = str(cache)
        knobs.compilation.listener = compiled
        driver.set_active(_Absent(chip))
        try:
            yield
        finally:
            driver._active = active
