"""Decoding by the kernel whose tiles are loaded into registers (kernels/registers.py): its shapes and its call.

Importing it needs a Triton whose Gluon has what the kernel uses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import AxesLayout
from octavo_triton.kernels import registers
from octavo_triton.kernels.common import is_upright
from octavo_triton.kernels.register_tiles import TOKENS
from octavo_triton.plan import Decodes, Plan
from octavo_triton.tuning import DecodeTile

_HEADS = 8
"""Query heads of a key head, at most: more would want more registers than there are, as would larger heads."""
_HEAD_SIZES = (64, 128)
_TOKENS = TOKENS.value
FEW = DecodeTile(keys=4 * _TOKENS, warps=4, stages=1, per_processor=2)
"""For rows that do not fill the device: fewer parts are joined sooner."""
MANY = DecodeTile(keys=2 * _TOKENS, warps=2, stages=1, per_processor=4)
_UPRIGHT_REGISTERS = 200
"""Of a thread, with many rows: so five programs run on a processor, where the assembler would have four."""
_MOST_JOINED, _HELD = 32, 128
"""Parts, and elements of a thread of all of them, that are joined at a time."""

Strides = tuple[int, ...]


def can_run(spec: AttentionSpec, layout: AxesLayout, keys: Strides, values: Strides) -> bool:
    """With dtypes of two bytes, a cache of the same or of one byte, of which a lane can load eight elements at once."""
    plain = spec.dtype.itemsize == 2 and (spec.kv_dtype == spec.dtype or spec.kv_dtype.itemsize == 1)
    fits = spec.head_size in _HEAD_SIZES and spec.group <= _HEADS
    if not plain or not fits or not _in_runs(keys):
        return False
    return _in_runs(values) or (_is_upright(values, layout.block_size) and layout.block_size % _TOKENS == 0)


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


def decode(arguments: dict[str, Any], plan: Plan, work: Decodes) -> None:
    """`arguments`: what all attending kernels are given."""
    room = work.items.shape[1]
    given = {name: value for name, value in arguments.items() if name != "DIMS"}
    upright = _is_upright(given["VALUE"], given["BLOCK_SIZE"])
    if upright and work.tile == MANY:
        given["maxnreg"] = _UPRIGHT_REGISTERS
    given["sinks"] = given["out"] if given["sinks"] is None else given["sinks"]  # Gluon has no argument that is None
    registers.decode[(given["KV_HEADS"] * room,)](
        **given, table=plan.table, contexts=plan.contexts, items=work.items, partial=work.scratch.partial,
        arrived=work.scratch.arrived, width=plan.table.shape[1], room=room, HEADS=_HEADS,
        UPRIGHT=upright, JOINED=joined(work.tile, given["GROUP"], given["SIZE"]), WARPS=work.tile.warps,
        num_warps=work.tile.warps,
    )  # fmt: skip
