"""What a case is run with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from octavo.attention.contract import AttentionSpec

SCALE = 0.1
"""Not head_size ** -0.5 for any usual head size, so that a backend that assumes it is noticed."""


SLOPE = 0.1
"""The first head's; the second has a half of it, the third a third: no model's, so that a backend that works slopes out
by itself is noticed."""


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
    alibi: bool = False
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
            alibi_slopes=tuple((SLOPE / torch.arange(1, self.heads + 1)).tolist()) if self.alibi else None,
            batch_invariant=self.batch_invariant,
        )

    def __str__(self) -> str:
        """E.g. `fp32-4/2x64-b16-window5-nan-keys`: dtype, heads / key heads x size, block size, the rest."""
        words = [_word(self.dtype), f"{self.heads}/{self.kv_heads}x{self.head_size}", f"b{self.block_size}"]
        words += [f"cache-{_word(self.kv_dtype)}"] if self.kv_dtype != self.dtype else []
        words += [f"{name}{getattr(self, name):g}" for name in ("window", "softcap") if getattr(self, name) is not None]
        flags = {"sinks": self.sinks, "alibi": self.alibi, "scaled": self.scaled, "invariant": self.batch_invariant}
        words += [name for name, wanted in flags.items() if wanted]
        return "-".join([*words, self.dirt.value])


def _word(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(name, name)
