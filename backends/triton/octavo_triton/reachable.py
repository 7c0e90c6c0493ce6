"""What layers may ask of a backend on one architecture: the configurations in which its kernels are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.attention.contract import AttentionSpec, Capabilities
from octavo_triton.gpu import FLOATS, GPUBackend

_COMMON = AttentionSpec(
    layers=1, heads=32, kv_heads=8, head_size=128, scale=0.1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)
_SINGLE = replace(_COMMON, dtype=torch.float32, kv_dtype=torch.float32)
_ALL: dict[str, Any] = {"window": 1000, "softcap": 30.0, "sinks": True}
_KV_HEADS = (1, 4, 16, 32)
"""Of 32 heads: 32, 8, 2 and 1 query heads to a key head, beside the common 4."""
_BLOCK_SIZES = (1, 16, 24, 32, 64, 128, 256)
"""24 is no power of two: such blocks are loaded slot by slot."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one set of kernels is compiled for."""

    spec: AttentionSpec
    block_size: int
    small: bool = False
    """Keys, and values, of one layer lie within 2 GiB: AMD's compiler has other loads for such."""

    def __str__(self) -> str:
        """E.g. `b256 32/8x128 bfloat16 cache float8_e5m2 sinks window`."""
        spec = self.spec
        small = ["within 2 GiB"] * self.small
        cache = [f"cache {spec.kv_dtype}"] if spec.kv_dtype != spec.dtype else []
        invariant = ["invariant"] * spec.batch_invariant
        shape = f"b{self.block_size} {spec.heads}/{spec.kv_heads}x{spec.head_size} {spec.dtype}"
        return " ".join([shape, *cache, *sorted(spec.features), *invariant, *small]).replace("torch.", "")


def configurations(backend: type[GPUBackend], architecture: str, *, complete: bool) -> list[Configuration]:
    """Each once, those that say most first. `complete`: every value that is declared for it, else the most unlike."""
    declared = backend.capabilities_for(architecture)
    usual = declared.preferred_block_size
    found: dict[Configuration, None] = {}
    asked = list(_unlike(declared, usual))
    if architecture.startswith("gfx"):
        asked += [replace(one, small=True) for one in (asked if complete else asked[:1])]
    if complete:
        asked += _every(declared, usual)
    for one in asked:
        if not declared.refusals(one.spec, one.block_size):
            found[one] = None
    return list(found)


def _unlike(declared: Capabilities, usual: int) -> Iterator[Configuration]:
    yield Configuration(_COMMON, usual)
    yield Configuration(replace(_COMMON, head_size=64), usual)
    for kv_dtype in declared.kv_dtypes:
        if "e4m3" in str(kv_dtype):
            yield Configuration(replace(_COMMON, kv_dtype=kv_dtype), usual)
            yield Configuration(replace(_COMMON, kv_dtype=kv_dtype, head_size=64), usual)
    yield Configuration(replace(_SINGLE, head_size=64), usual)
    yield Configuration(replace(_COMMON, head_size=80), 24)
    yield Configuration(replace(_COMMON, head_size=256, **_ALL), usual)
    yield Configuration(replace(_COMMON, kv_heads=1), usual)
    yield Configuration(replace(_COMMON, batch_invariant=True), usual)


def _every(declared: Capabilities, usual: int) -> Iterator[Configuration]:
    for size in declared.head_sizes:
        if isinstance(size, int):
            yield Configuration(replace(_COMMON, head_size=size), usual)
            yield Configuration(replace(_SINGLE, head_size=size), usual)
    for dtype in FLOATS:
        for kv_dtype in declared.kv_dtypes:
            yield Configuration(replace(_COMMON, dtype=dtype, kv_dtype=kv_dtype), usual)
            yield Configuration(replace(_COMMON, dtype=dtype, kv_dtype=kv_dtype, head_size=64), usual)
    for kv_heads in _KV_HEADS:
        yield Configuration(replace(_COMMON, kv_heads=kv_heads), usual)
    for block_size in _BLOCK_SIZES:
        yield Configuration(_COMMON, block_size)
        yield Configuration(replace(_COMMON, head_size=80), block_size)
    for name, value in _ALL.items():
        yield Configuration(replace(_COMMON, **{name: value}), usual)
    for kv_dtype in declared.kv_dtypes:
        yield Configuration(replace(_COMMON, kv_dtype=kv_dtype, **_ALL), usual)
        yield Configuration(replace(_COMMON, kv_dtype=kv_dtype, batch_invariant=True), usual)
