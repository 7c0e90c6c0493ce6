"""Which caches kernels read under which queries, where not every declared dtype goes with every other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import KVCacheLayout, LayoutType


@dataclass(frozen=True, slots=True)
class Unmixed:
    """A `LayoutType` that refuses a cache of another dtype than the queries', but for the pairs that are named."""

    layout: LayoutType
    pairs: Collection[tuple[torch.dtype, torch.dtype]] = ()
    """The dtype of queries, and another one of a cache that goes with it."""

    def __call__(self, spec: AttentionSpec, block_size: int) -> KVCacheLayout:
        """As `layout` makes it. Raises ValueError for a pair that is not taken."""
        if spec.kv_dtype != spec.dtype and (spec.dtype, spec.kv_dtype) not in self.pairs:
            raise ValueError(f"a cache of {spec.kv_dtype} is not for queries of {spec.dtype}")
        return self.layout(spec, block_size)
