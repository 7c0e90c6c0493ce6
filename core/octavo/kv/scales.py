"""Scales of an fp8 cache: keys and values are divided by them on their way in, what attention makes of them multiplied.

Every backend gets it without a line of its own: `scale * query . key` is `scale * (query * s) . (key / s)`, and what is
computed of values / s, times s, is what is computed of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec


def is_fp8(dtype: torch.dtype) -> bool:
    """Is it a float of one byte, whose few exponents scales make the most of?"""
    return dtype.is_floating_point and dtype.itemsize == 1


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Those of one layer, float32. Made by `of`.

    They have the same shapes where heads share a scale: so layers that differ in this alone are compiled once.
    """

    query: Tensor
    """[heads, 1]: the scale of the key head that a query head meets."""
    key: Tensor
    """[kv_heads, 1]."""
    value: Tensor
    """[kv_heads, 1]."""
    output: Tensor
    """[heads, 1]: as `query`, of values."""
    largest: float
    """What the cache's dtype holds at most: a number beyond it is cut to that, as calibration means it to be."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor, spec: AttentionSpec) -> KVScales:
        """From scales [1] or [kv_heads] float32, on the device where they are used."""
        key, value = (given.repeat(spec.kv_heads // len(given))[:, None] for given in (key, value))
        query, output = (given.repeat_interleave(spec.group, dim=0) for given in (key, value))
        return cls(query, key, value, output, torch.finfo(spec.kv_dtype).max)

    def asking(self, query: Tensor) -> Tensor:
        """[tokens, heads, head_size] -> what meets the keys in the cache."""
        return _rounded(query.float() * self.query, query.dtype)

    def cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Each [tokens, kv_heads, head_size] -> what goes into the cache, still in their own dtype."""
        largest = self.largest
        return (
            _rounded(key.float() / self.key, key.dtype, largest),
            _rounded(value.float() / self.value, value.dtype, largest),
        )

    def restored(self, output: Tensor) -> Tensor:
        """Attention [tokens, heads, head_size] of cached values -> attention of the values."""
        return _rounded(output.float() * self.output, output.dtype)


def _rounded(product: Tensor, dtype: torch.dtype, largest: float | None = None) -> Tensor:
    """Rounded once; never infinite, which a softmax would make NaN of: float16 ends at 65504."""
    most = torch.finfo(dtype).max if largest is None else largest
    return product.clamp(-most, most).to(dtype)
