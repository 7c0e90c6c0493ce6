"""Memory in which FlashInfer keeps what parts of contexts give, until they are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec

MOST_ROWS: Final = 512
"""Rows of a captured step that there is room for from the start; one of more makes a larger workspace."""
MOST_BYTES: Final = 1 << 29
"""Of a workspace, for captured steps' sake: one that wants more, as with many heads to a key head, is not captured."""
_CTAS_PER_PROCESSOR: Final = 2
"""Of a split step, by FlashInfer's plan."""
_FEW, _SOME, _MANY = 16, 64, 128
"""Queries of a tile, those of a group's heads together."""
_SPARE: Final = 1 << 20
"""Bytes for the edges to which its allocator aligns."""
INTEGERS: Final = 1 << 20
"""Bytes of a captured step's plan: 34 for each of its rows, which are thousands at most."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Workspace:
    """Launches follow one another, so all groups of layers on a device share it."""

    floats: Tensor
    """uint8 [bytes], zeros at first."""

    @classmethod
    def of(cls, device: torch.device, size: int) -> Workspace:
        """At least so many bytes: what others have made, if it is large enough."""
        held = _SHARED.get(device)
        if held is None or len(held.floats) < size:
            held = cls(torch.zeros(size, dtype=torch.uint8, device=device))
            _SHARED[device] = held
        return held


_SHARED: WeakValueDictionary[torch.device, Workspace] = WeakValueDictionary()


def needed(spec: AttentionSpec, rows: int, processors: int, *, split_prompts: bool) -> int:
    """Bytes for captured steps of so many rows that decode, and for all others.

    They are those of FlashInfer's own plan (its PrefillPlan, which decoding on tensor cores has too): for each part a
    value of each head in float32, and its sum. `split_prompts`: the kernel for prompts splits contexts too.
    """
    most = max(_CTAS_PER_PROCESSOR * processors // spec.kv_heads, 1)
    tile = _tile(spec, spec.group)
    tiles = -(-rows * spec.group // tile) + rows - 1
    parts = spec.heads * tile * max(most, tiles)
    if split_prompts:
        parts = max(parts, spec.heads * most * _tile(spec, math.inf))
    return parts * (spec.head_size + 1) * torch.float32.itemsize + _SPARE


def _tile(spec: AttentionSpec, queries: float) -> int:
    """Queries of a tile where a row has so many."""
    if queries <= _FEW:
        return _FEW
    return _SOME if queries <= _SOME or spec.head_size >= 2 * _MANY else _MANY
