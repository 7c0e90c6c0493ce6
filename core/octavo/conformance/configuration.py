"""What a case is run with, and which configurations follow from what a backend declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import EllipsisType

import torch

from octavo.attention.contract import AttentionSpec, Capabilities
from octavo.kv.scales import is_fp8

SCALE = 0.1
"""Not head_size ** -0.5 for any usual head size, so that a backend that assumes it is noticed."""


class Dirt(Enum):
    """What the cache holds before anything is written. Zeros would hide that unwritten slots are read."""

    NAN_KEYS = "nan-keys"
    NAN_VALUES = "nan-values"
    NAN = "nan"
    FINITE = "finite"

    @property
    def key_fill(self) -> float:
        """What fills the keys."""
        return 100.0 if self in (Dirt.FINITE, Dirt.NAN_VALUES) else float("nan")

    @property
    def value_fill(self) -> float:
        """What fills the values."""
        return 100.0 if self in (Dirt.FINITE, Dirt.NAN_KEYS) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One combination of what a backend may declare, and the state in which its cache starts."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    batch_invariant: bool = False
    scale: float = SCALE
    dirt: Dirt = Dirt.NAN
    layers: int = 2
    high: bool = False
    """Blocks from the far end of a large cache."""
    scaled: bool = False
    """Keys and values beyond what the cache's dtype holds, with scales for each layer and head."""

    @property
    def spec(self) -> AttentionSpec:
        """The group of layers that the backend is made for."""
        return AttentionSpec(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            batch_invariant=self.batch_invariant,
        )

    def __str__(self) -> str:
        """E.g. `fp32-4/2x64-b16-window5-nan-keys`: dtype, heads / key heads x size, block size, the rest."""
        words = [_word(self.dtype), f"{self.heads}/{self.kv_heads}x{self.head_size}", f"b{self.block_size}"]
        words += [f"cache-{_word(self.kv_dtype)}"] if self.kv_dtype != self.dtype else []
        words += [f"{name}{getattr(self, name):g}" for name in ("window", "softcap") if getattr(self, name) is not None]
        flags = {"sinks": self.sinks, "scaled": self.scaled, "invariant": self.batch_invariant}
        words += [name for name, wanted in flags.items() if wanted]
        return "-".join([*words, self.dirt.value])


def _word(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(name, name)


def _declared(sizes: tuple[int | EllipsisType, ...], any_other: tuple[int, ...]) -> list[int]:
    """The sizes named, and those that stand for `...`."""
    named = [size for size in sizes if isinstance(size, int)]
    return sorted({*named, *(any_other if ... in sizes else ())})


def block_sizes(capabilities: Capabilities) -> list[int]:
    """Every declared block size; `...` is tried at 1, 16, 24 (no power of two), 64 and 256."""
    return _declared(capabilities.block_sizes, (1, 16, 24, 64, 256))


def head_sizes(capabilities: Capabilities) -> list[int]:
    """Every declared head size; `...` is tried at 64, 80 (no power of two) and 128."""
    return _declared(capabilities.head_sizes, (64, 80, 128))


def base(capabilities: Capabilities) -> Configuration:
    """The smallest declared sizes (but blocks of 16 where they can be), fp32 where it can be."""
    blocks, dtypes = block_sizes(capabilities), capabilities.dtypes
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    return Configuration(
        head_size=head_sizes(capabilities)[0],
        block_size=16 if 16 in blocks else blocks[0],
        dtype=dtype,
        kv_dtype=dtype if dtype in capabilities.kv_dtypes else capabilities.kv_dtypes[0],
    )


def once(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base alone."""
    yield base(capabilities)


def all_dirt(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base with each state of the cache."""
    for dirt in Dirt:
        yield replace(base(capabilities), dirt=dirt)


def all_groups(capabilities: Capabilities) -> Iterator[Configuration]:
    """1, 4 and 8 query heads to a key head."""
    for heads, kv_heads in ((4, 4), (8, 2), (8, 1)):
        yield replace(base(capabilities), heads=heads, kv_heads=kv_heads)


def all_block_sizes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared block size."""
    for size in block_sizes(capabilities):
        yield replace(base(capabilities), block_size=size)


def all_head_sizes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared head size."""
    for size in head_sizes(capabilities):
        yield replace(base(capabilities), head_size=size)


def all_dtypes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared dtype with each declared cache dtype: any two may meet."""
    for dtype in capabilities.dtypes:
        for kv_dtype in capabilities.kv_dtypes:
            yield replace(base(capabilities), dtype=dtype, kv_dtype=kv_dtype)


def scaled(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared dtype with each declared fp8 cache, with scales."""
    for configuration in all_dtypes(capabilities):
        if is_fp8(configuration.kv_dtype):
            yield replace(configuration, scaled=True)


def all_features(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared feature, all of them together, and all of them in each dtype."""
    plain, features = base(capabilities), capabilities.features
    if "window" in features:
        for window in (1, max(2, plain.block_size // 4), plain.block_size + 5, 100_000):
            yield replace(plain, window=window)
    if "softcap" in features:
        yield replace(plain, softcap=2.0)
    if "sinks" in features:
        yield replace(plain, sinks=True)
    if len(features) > 1:
        yield from _together(capabilities)


def _together(capabilities: Capabilities) -> Iterator[Configuration]:
    """All declared features in each dtype."""
    plain, features = base(capabilities), capabilities.features
    together = replace(
        plain,
        window=plain.block_size + 5 if "window" in features else None,
        softcap=2.0 if "softcap" in features else None,
        sinks="sinks" in features,
    )
    for dtype in capabilities.dtypes:
        kv_dtype = dtype if dtype in capabilities.kv_dtypes else capabilities.kv_dtypes[0]
        yield replace(together, dtype=dtype, kv_dtype=kv_dtype)


def invariant(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base, and all declared features in each dtype, where a token's bits are to be its own affair."""
    for plain in dict.fromkeys((base(capabilities), *_together(capabilities))):
        yield replace(plain, batch_invariant=True, layers=1)


def large_logits(capabilities: Capabilities) -> Iterator[Configuration]:
    """A scale that is a power of two keeps whole logits exact."""
    yield replace(base(capabilities), scale=0.125)


def high_blocks(capabilities: Capabilities) -> Iterator[Configuration]:
    """The smallest keys, in a cache that is as large as there is room for."""
    plain = base(capabilities)
    block_size = block_sizes(capabilities)[0]
    yield replace(plain, block_size=block_size, heads=2, kv_heads=1, layers=1, high=True)
