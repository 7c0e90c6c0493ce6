"""Compile what the CUDA backends launch, for GPUs that are not here, and say what it takes of them.

`python -m tests.backends.triton.compiler sm_90` prints one JSON line for each kernel. In a process of its own, without
the interpreter: the backends run as they do on a GPU, only that every launch compiles instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo.models import product, product_kernels
from octavo_cuda.backend import CUDABackend, FlashDecodingBackend, PagedBackend, tuned
from octavo_triton import kernels, launch
from octavo_triton.kernels import hopper, registers
from octavo_triton.tuning import Tuning

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""What a block may take: NVIDIA's CUDA C++ Programming Guide, table of technical specifications per capability."""
PROCESSORS = 132
WARP_GROUPS = "prefill by warp groups"
REGISTERS = "decode from registers"
_NAMES = ("split", "cut", "decode", "prefill", "write")


class _Driver:
    """As much of a driver as choosing what to compile takes."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiling:
    """Stands for a kernel: a launch compiles it and reports."""

    name: str
    kernel: Any
    report: Callable[[str, Any], None]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self.report(self.name, self.kernel.warmup(*given, grid=grid, **named))


@dataclass(frozen=True, slots=True)
class Shape:
    """What one set of kernels is compiled for."""

    backend: type[CUDABackend]
    block_size: int
    spec: AttentionSpec

    def __str__(self) -> str:
        spec = self.spec
        cache = f" cache {spec.kv_dtype}" if spec.kv_dtype != spec.dtype else ""
        words = (
            f"{self.backend.name} b{self.block_size} {spec.heads}/{spec.kv_heads}x{spec.head_size} {spec.dtype}{cache}"
        )
        features = sorted(spec.features) + ["invariant"] * spec.batch_invariant
        return f"{words} {' '.join(features)}".replace("torch.", "").strip()


def shapes(target: str, *, complete: bool) -> Iterator[Shape]:
    """Each layout with what is most unlike: sizes, groupings, dtypes, features. `complete`: every declared size too."""
    common = AttentionSpec(
        layers=1, heads=32, kv_heads=8, head_size=128, scale=0.1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
    )
    single = replace(common, dtype=torch.float32, kv_dtype=torch.float32)
    flash, paged = FlashDecodingBackend, PagedBackend
    yield from (Shape(flash, 256, common), Shape(flash, 16, replace(common, head_size=80)), Shape(paged, 16, common))
    if target != "sm_90" and not complete:  # one architecture stands for the others in what they compile alike
        yield from (Shape(paged, 16, replace(single, head_size=64)), Shape(flash, 256, replace(common, kv_heads=1)))
        return
    yield Shape(flash, 256, replace(common, window=1000, softcap=30.0, sinks=True, kv_dtype=torch.float8_e5m2))
    yield Shape(flash, 256, replace(common, head_size=64, window=1000, softcap=30.0, sinks=True))
    yield from (Shape(flash, 256, replace(common, head_size=256)), Shape(flash, 256, replace(common, kv_heads=1)))
    yield Shape(paged, 16, replace(single, head_size=64))
    yield Shape(flash, 256, replace(common, kv_dtype=torch.float32))
    yield from (
        Shape(flash, 256, replace(common, batch_invariant=True)),
        Shape(paged, 16, replace(common, batch_invariant=True)),
    )
    if not complete:
        return
    for backend in (flash, paged):
        usual = backend.capabilities.preferred_block_size
        for size in backend.capabilities.head_sizes:
            assert isinstance(size, int)
            yield Shape(backend, usual, replace(common, head_size=size))
            yield Shape(backend, usual, replace(single, head_size=size))
        for kv_heads in (1, 4, 16, 32):
            yield Shape(backend, usual, replace(common, kv_heads=kv_heads))
        for block_size in (1, 16, 32, 64, 128):
            yield Shape(backend, block_size, common)
        for one in (replace(common, window=1000), replace(common, softcap=30.0), replace(common, sinks=True)):
            yield Shape(backend, usual, one)
        yield Shape(backend, usual, replace(common, dtype=torch.float16, kv_dtype=torch.float16))
        yield Shape(backend, usual, replace(common, kv_dtype=torch.float8_e5m2))
        if target != "sm_80":
            yield Shape(backend, usual, replace(common, kv_dtype=torch.float8_e4m3fn))


def compile_all(shape: Shape, target: str) -> None:
    """Every kernel of a step in which one row decodes and another does not."""

    class There(shape.backend):  # type: ignore[name-defined,misc]
        def tune(self) -> Tuning:
            return tuned(shape.backend.name, shape.spec, target, SHARED_BYTES[target])

        def count_processors(self) -> int:
            return PROCESSORS

    backend = There(shape.spec, shape.block_size, CPU(), sinks=torch.zeros(1, 32) if shape.spec.sinks else None)
    cache = backend.layout.allocate(4, torch.device("cpu"))
    spec = shape.spec
    batch = _batch(1, 64)
    query = torch.empty(65, spec.heads, spec.head_size, dtype=spec.dtype)
    key = torch.empty(65, spec.kv_heads, spec.head_size, dtype=spec.dtype)
    backend.layout.write(cache, 0, key, key, batch.slots)
    backend.attend(query, key, key, cache, backend.plan(batch), 0)
    if backend._tiles is not None:  # many rows have a tile of their own
        many = _batch(*[1] * (PROCESSORS + 1))
        query = torch.empty(len(many.slots), spec.heads, spec.head_size, dtype=spec.dtype)
        backend.attend(query, query, query, cache, backend.plan(many), 0)


def compile_products() -> None:
    """Of one row and of as many as there may be, in one part and in several."""
    for rows, outputs, inputs in ((1, 64, 4096), (16, 1024, 4096), (32, 64 * PROCESSORS, 4096), (32, 1, 4000)):
        bias = None if outputs > 1 else torch.empty(outputs, dtype=torch.bfloat16)
        weight, x = (torch.empty(count, inputs, dtype=torch.bfloat16) for count in (outputs, rows))
        held = product.Scratch.of(PROCESSORS, torch.device("cpu"))
        product.run(torch.empty(rows, outputs, dtype=torch.bfloat16), x, weight, bias, held)


def _batch(*counts: int) -> AttentionBatch:
    return AttentionBatch(
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lengths=torch.full((len(counts),), 100, dtype=torch.int32),
        block_table=torch.zeros(len(counts), 100, dtype=torch.int32),
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        max_query=max(counts),
        max_context=100,
        decodes=counts.count(1),
    )


def resources(compiled: Any) -> dict[str, Any]:
    """Registers of a thread, bytes of shared memory, bytes that spill, and whether the matrix unit is used.

    As the assembler left it in the binary, which a cache holds too: its own report would take assembling once more.
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    taken = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert taken is not None, told
    return {
        "registers": int(taken[1]),
        "spilled_bytes": int(taken[2]),
        "shared_bytes": compiled.metadata.shared,
        "matrix_unit": any(word in compiled.asm["ptx"] for word in ("mma.sync", "wgmma", "tcgen05.mma")),
    }


def main(target: str, part: int = 0, parts: int = 0) -> None:
    """Print what each kernel takes; of all shapes that part of several parts, where there are any."""
    triton.runtime.driver.set_active(_Driver(GPUTarget("cuda", int(target.removeprefix("sm_")), 32)))
    seen: set[str] = set()
    shape_name = ""

    def report(name: str, compiled: Any) -> None:
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            print(json.dumps({"kernel": name, "shape": shape_name} | resources(compiled)), flush=True)  # noqa: T201

    launch.starts_early = lambda device: target != "sm_80"
    launch.is_hopper = lambda device: target == "sm_90"
    launch.is_nvidia = lambda device: True
    registers.decode = Compiling(REGISTERS, registers.decode, report)
    hopper.prefill = Compiling(WARP_GROUPS, hopper.prefill, report)
    for name in _NAMES:
        setattr(kernels, name, Compiling(name, getattr(kernels, name), report))
    for name in ("one_row", "few_rows"):
        setattr(product_kernels, name, Compiling(name, getattr(product_kernels, name), report))
    if not part:
        shape_name = "product"
        compile_products()
    for number, shape in enumerate(shapes(target, complete=parts > 0)):
        if not parts or number % parts == part:
            shape_name = str(shape)
            compile_all(shape, target)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
