"""Decoding by the kernel whose tiles are loaded into registers (kernels/registers.py): its shapes and its call.

Importing it needs a Triton whose Gluon has what the kernel uses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import AxesLayout
from octavo_triton.kernels import registers
from octavo_triton.kernels.common import is_upright
from octavo_triton.plan import Decodes, Plan
from octavo_triton.tuning import WARP_TOKENS, DecodeTile, RegisterTiles, Tuning

_HEADS = 8
"""Query heads of a key head, at most: more would want more registers than there are, as would larger heads."""
_HEAD_SIZES = (64, 128)
_MOST_JOINED, _HELD = 32, 128
"""Parts, and elements of a thread of all of them, that are joined at a time."""
_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

Strides = tuple[int, ...]


def can_run(spec: AttentionSpec, layout: AxesLayout, keys: Strides, values: Strides) -> bool:
    """With dtypes of two bytes, a cache of the same or of one byte, of which a lane can load eight elements at once."""
    plain = spec.dtype.itemsize == 2 and (spec.kv_dtype == spec.dtype or spec.kv_dtype.itemsize == 1)
    fits = spec.head_size in _HEAD_SIZES and spec.group <= _HEADS
    if not plain or not fits or not _in_runs(keys):
        return False
    return _in_runs(values) or (_is_upright(values, layout.block_size) and layout.block_size % WARP_TOKENS == 0)


def tiles(tuning: Tuning, layout: AxesLayout, values: Strides) -> RegisterTiles:
    """Those for the layout."""
    wide = _is_upright(values, layout.block_size) and layout.block_size > WARP_TOKENS
    return tuning.wide if wide else tuning.registers


@cache  # it is asked at every launch
def _is_upright(values: Strides, block_size: int) -> bool:
    return bool(is_upright(values, block_size))


def joined(tile: DecodeTile, group: int, size: int) -> int:
    """Parts of a context that are joined at a time: as many as registers hold."""
    elements = (1 << (group - 1).bit_length()) * size // (32 * tile.warps)
    return max(1, min(_MOST_JOINED, _HELD // max(1, elements)))


def _in_runs(strides: Strides) -> bool:
    """Do dims lie side by side, eight at least?"""
    return strides[9] == 1 and strides[8] % 8 == 0


@cache
def _in_words(strides: Strides, packed: int) -> Strides:
    """Of words of so many elements that lie side by side: strides of blocks, and of slots, heads and dims."""
    axes = [strides[at : at + 3] for at in (1, 4, 7)]
    words = [
        (outer // packed, size // packed, 1) if inner == 1 else (outer // packed, size, inner // packed)
        for outer, size, inner in axes
    ]
    return (strides[0] // packed, *words[0], *words[1], *words[2])


def decode(arguments: dict[str, Any], plan: Plan, work: Decodes) -> None:
    """`arguments`: what all attending kernels are given."""
    room = len(work.items)
    given = {name: value for name, value in arguments.items() if name != "DIMS"}
    upright = _is_upright(given["VALUE"], given["BLOCK_SIZE"])
    given["sinks"] = given["out"] if given["sinks"] is None else given["sinks"]  # Gluon has no argument that is None
    float8 = _FLOAT8.get(given["keys"].dtype)
    packed = 4 // given["keys"].itemsize
    given |= {name: given[name].view(-1).view(torch.int32) for name in ("keys", "values")}
    given |= {name: _in_words(given[name], packed) for name in ("KEY", "VALUE")}
    registers.decode[(given["KV_HEADS"] * room,)](
        **given, table=plan.table, contexts=plan.contexts, items=work.items, partial=work.scratch.partial,
        arrived=work.scratch.arrived, width=plan.table.shape[1], HEADS=_HEADS,
        UPRIGHT=upright, FLOAT8=float8, JOINED=joined(work.tile, given["GROUP"], given["SIZE"]),
        WARPS=work.tile.warps, num_warps=work.tile.warps,
    )  # fmt: skip
