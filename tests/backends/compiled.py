"""Kernels compiled for GPUs that are not here, as `octavo kernels compile` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

from octavo.attention.ahead import CompiledKernel
from octavo_triton.chips import Chip, chips
from octavo_triton.gpu import GPUBackend

DOTS = {"decode.decode", "prefill.prefill"}
"""Portable kernels that multiply tiles."""


def chip_of(backend: type[GPUBackend], target: str) -> Chip:
    """What is known of it."""
    return chips(backend.folder / "chips.json")[target]


Given = ParamSpec("Given")
Found = TypeVar("Found")


def apart(function: Callable[Given, Found], *given: Given.args, **named: Given.kwargs) -> Found:
    """In a process of its own: where kernels were interpreted, Triton's language compiles no more."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *given, **named).result()


def compiled(wanted: Mapping[type[GPUBackend], Sequence[str]], target: str, cache: Path) -> list[CompiledKernel]:
    """Of these configurations of each backend."""
    return apart(_compiled, wanted, target, cache)


def _compiled(wanted: Mapping[type[GPUBackend], Sequence[str]], target: str, cache: Path) -> list[CompiledKernel]:
    return [
        kernel
        for backend, configurations in wanted.items()
        for configuration in configurations
        for kernel in backend.ahead()[target].compile(configuration, cache)
    ]


def fits(one: CompiledKernel, chip: Chip) -> None:
    """What every kernel must keep to."""
    assert 0 < one.registers <= chip.registers, one
    assert one.shared_bytes <= chip.shared_bytes, one
    assert one.programs >= 1, one
    assert one.code_bytes > 0, one
    if one.kernel in DOTS and "float32" not in one.configuration:
        assert one.matrix_instructions > 0, one
