"""Calls of the kernels: the only module that needs Triton, so that its absence is a backend's reason, not an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import triton
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import AxesLayout, KVCache
from octavo_triton import kernels
from octavo_triton.plan import Decodes, Plan
from octavo_triton.tuning import PrefillTile, RegisterTiles, Tuning

logger = logging.getLogger(__name__)

_FEWEST_ROWS = 256
"""Planning kernels are compiled for so many rows at least, and above for the next power of two."""
_COMPARED = 1 << 14
"""Pairs of an item and a row that one program of a planning kernel compares."""
_SHARES = 32
"""Lengths of parts among which a planning kernel chooses."""
_WRITTEN = 1
"""Tokens that one program writes."""
_MOST_JOINED, _HELD = 16, 8192
"""Parts, and float32 elements of all of them, that one program joins at a time."""


_assumed: int | None = None
"""The capability of a GPU that is not here, while kernels are compiled for it."""


@contextmanager
def on_capability(major: int) -> Iterator[None]:
    """Within, kernels are chosen as on such a GPU of NVIDIA's; 0: on another maker's."""
    global _assumed
    before, _assumed = _assumed, major
    try:
        yield
    finally:
        _assumed = before


def _capability(device: torch.device) -> int:
    """NVIDIA's major number of a GPU's; 0 for other devices."""
    return _found_capability(device) if _assumed is None else _assumed


@cache
def _found_capability(device: torch.device) -> int:
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if on_gpu else 0


def starts_early(device: torch.device) -> bool:
    """Can it start a kernel while the one before still runs (programmatic dependent launch)?"""
    return _capability(device) >= 9


def is_nvidia(device: torch.device) -> bool:
    """A GPU of theirs whose matrix unit takes bfloat16?"""
    return _capability(device) >= 8


def is_hopper(device: torch.device) -> bool:
    """Has it a matrix unit that whole warp groups share?"""
    return _capability(device) == 9


def _early(device: torch.device) -> dict[str, bool]:
    """Arguments of every launch."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def split(work: Decodes, contexts: Tensor, table: Tensor, block_size: int, window: int | None) -> None:
    """Fill `work.items`."""
    room = len(work.items)
    rows, items, warps = _planning(work.rows)
    kernels.split[(triton.cdiv(room, items),)](
        work.items, contexts, table, table.shape[1], work.rows, room, work.wanted, work.few,
        ROWS=rows, ITEMS=items, SHARES=max(2, min(_SHARES, _COMPARED // rows)), UNIT=work.tile.keys,
        JOINED=_MOST_JOINED, BLOCK_SIZE=block_size, WINDOW=window, num_warps=warps, **_early(contexts.device),
    )  # fmt: skip


def cut(tiles: Tensor, query_starts: Tensor, first_row: int, tokens: int) -> None:
    """Fill `tiles` with tiles of `tokens` query tokens of the rows from `first_row` on."""
    rows, room = len(query_starts) - 1, tiles.shape[1]
    held, items, warps = _planning(rows)
    kernels.cut[(triton.cdiv(room, items),)](
        tiles, query_starts, first_row, rows, room, tokens, ROWS=held, ITEMS=items, num_warps=warps,
        **_early(tiles.device),
    )  # fmt: skip


def _planning(rows: int) -> tuple[int, int, int]:
    """Of a planning kernel for so many rows: how many it is compiled for, items of a program, and its warps."""
    held = max(_FEWEST_ROWS, triton.next_power_of_2(rows))
    return held, max(1, _COMPARED // held), 4 if held == _FEWEST_ROWS else 8


def register_tiles(
    spec: AttentionSpec, layout: AxesLayout, device: torch.device, tuning: Tuning
) -> RegisterTiles | None:
    """Tiles for the kernel that decodes from registers, None where it cannot run."""
    if spec.batch_invariant or not is_nvidia(device):
        return None
    module = _gluon("registers", "rows that decode")
    keys, values = _strides(layout, layout.allocate(1, torch.device("meta")), 0)
    if module is None or not module.can_run(spec, layout, keys, values):
        return None
    found: RegisterTiles = module.tiles(tuning, layout, values)
    return found


def _gluon(name: str, what: str) -> ModuleType | None:
    """A module of this package that wants Gluon, which is new, and changes from version to version."""
    try:
        return import_module(f"octavo_triton.{name}")
    except (ImportError, AttributeError) as error:
        logger.warning("%s take the portable kernel: this Triton's Gluon lacks something (%s)", what, error)
        return None


def warp_groups(spec: AttentionSpec, layout: AxesLayout, device: torch.device) -> PrefillTile | None:
    """The tile of prompts for the kernel of specialized warp groups, None where it cannot run: see `warp_groups`."""
    if spec.batch_invariant or not is_hopper(device):
        return None
    module = _gluon("warp_groups", "prompts")
    tile: PrefillTile | None = None if module is None else module.tile(spec, layout)
    return tile


class Attention:
    """The attending kernels for one group of layers."""

    def __init__(self, spec: AttentionSpec, layout: AxesLayout, sinks: Tensor | None) -> None:
        self.spec = spec
        self.layout = layout
        self.sinks = sinks

    def _arguments(self, out: Tensor, query: Tensor, cache: KVCache, layer: int) -> dict[str, object]:
        spec = self.spec
        keys, values = _strides(self.layout, cache, layer)
        return {
            "out": out, "query": query, "keys": cache.keys[layer], "values": cache.values[layer],
            "query_token": query.stride(0), "query_head": query.stride(1), "scale": spec.scale,
            "sinks": None if self.sinks is None else self.sinks[layer],
            "KV_HEADS": spec.kv_heads, "GROUP": spec.group, "SIZE": spec.head_size,
            "DIMS": max(16, triton.next_power_of_2(spec.head_size)), "KEY": keys, "VALUE": values,
            "BLOCK_SIZE": self.layout.block_size, "WINDOW": spec.window, "SOFTCAP": spec.softcap, "SINKS": spec.sinks,
            **_early(out.device),
        }  # fmt: skip

    def decode(self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, work: Decodes, layer: int) -> None:
        """Into the first rows of `out`."""
        tile, room = work.tile, len(work.items)
        kernels.decode[(self.spec.kv_heads * room,)](
            **self._arguments(out, query, cache, layer),
            table=plan.table, contexts=plan.contexts, items=work.items, partial=work.scratch.partial,
            arrived=work.scratch.arrived,
            width=plan.table.shape[1], HEADS=max(16, triton.next_power_of_2(self.spec.group)),
            TILE=tile.keys, STAGES=tile.stages, JOINED=_joined(self.spec), **tile.compiled_with,
        )  # fmt: skip

    def decode_from_registers(
        self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, work: Decodes, layer: int
    ) -> None:
        """As `decode`, with a shape from `registers`."""
        from octavo_triton.registers import decode

        decode(self._arguments(out, query, cache, layer), plan, work)

    def prefill(
        self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, tiles: Tensor, shape: PrefillTile, layer: int
    ) -> None:
        """Into the tokens of `out` that belong to the tiles' rows."""
        room = tiles.shape[1]
        kernels.prefill[(self.spec.kv_heads * room,)](
            **self._arguments(out, query, cache, layer),
            table=plan.table, query_starts=plan.query_starts, contexts=plan.contexts, tiles=tiles,
            width=plan.table.shape[1], room=room, QUERIES=shape.queries, TILE=shape.keys, STAGES=shape.stages,
            INVARIANT=self.spec.batch_invariant, **shape.compiled_with,
        )  # fmt: skip

    def prefill_by_warp_groups(
        self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, tiles: Tensor, shape: PrefillTile, layer: int
    ) -> None:
        """As `prefill`, with a shape from `warp_groups`."""
        from octavo_triton.warp_groups import prefill

        sinks = None if self.sinks is None else self.sinks[layer]
        keys, values = cache.keys[layer], cache.values[layer]
        prefill(out, query, keys, values, plan, tiles, shape, self.spec, self.layout.block_size, sinks)


def _joined(spec: AttentionSpec) -> int:
    """Parts of a context that are joined at a time: as many as registers hold."""
    elements: int = triton.next_power_of_2(spec.group) * triton.next_power_of_2(spec.head_size)
    return max(1, min(_MOST_JOINED, _HELD // elements))


def write(layout: AxesLayout, cache: KVCache, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """key, value: [tokens, kv_heads, head_size]; slots: [tokens] int64, -1 writes nothing."""
    keys, values = _strides(layout, cache, layer)
    kernels.write[(triton.cdiv(len(slots), _WRITTEN),)](
        cache.keys[layer], cache.values[layer], key, value, slots, *key.stride()[:2], *value.stride()[:2], len(slots),
        KV_HEADS=layout.kv_heads, SIZE=layout.head_size, KEY=keys, VALUE=values, BLOCK_SIZE=layout.block_size,
        TOKENS=_WRITTEN, ELEMENTS=triton.next_power_of_2(layout.kv_heads * layout.head_size),
        LARGEST=_largest(key.dtype, layout.dtype), **_early(key.device),
    )  # fmt: skip


def _strides(layout: AxesLayout, cache: KVCache, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As kernels take them: flat, since they index no tuple of tuples."""
    keys, values = ((block, *slot, *head, *dim) for block, slot, head, dim in layout.strides(cache, layer))
    return keys, values


def _largest(given: torch.dtype, kept: torch.dtype) -> float | None:
    """What a dtype holds at most, if it is less than what it is given may be: no number must become infinite or NaN."""
    most = float(torch.finfo(kept).max)
    return most if most < float(torch.finfo(given).max) else None
