"""Calls of the kernels: the only module that needs Triton, so that its absence is a backend's reason, not an error."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import TOKEN_MAJOR, AxesLayout, KVCache
from octavo_triton import kernels
from octavo_triton.kernels import hopper
from octavo_triton.plan import Decodes, Plan
from octavo_triton.tuning import PrefillTile

_FEWEST_ROWS = 256
"""Planning kernels are compiled for so many rows at least, and above for the next power of two."""
_COMPARED = 1 << 14
"""Pairs of an item and a row that one program of a planning kernel compares."""
_WRITTEN = 1
"""Tokens that one program writes."""
_MOST_JOINED, _HELD = 16, 8192
"""Parts, and float32 elements of all of them, that one program joins at a time."""


@cache
def _capability(device: torch.device) -> int:
    """NVIDIA's major number of a GPU's; 0 for other devices."""
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if on_gpu else 0


def starts_early(device: torch.device) -> bool:
    """Can it start a kernel while the one before still runs (programmatic dependent launch)?"""
    return _capability(device) >= 9


def is_hopper(device: torch.device) -> bool:
    """Has it a matrix unit that whole warp groups share?"""
    return _capability(device) == 9


def _early(device: torch.device) -> dict[str, bool]:
    """Arguments of every launch."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


_GROUPS_BYTES = 160_000
"""Of a processor's shared memory, for the tiles that are on their way to warp groups."""


def split(work: Decodes, contexts: Tensor, window: int | None) -> None:
    """Fill `work.items`."""
    room = work.items.shape[1]
    rows, items, warps = _planning(work.rows)
    kernels.split[(triton.cdiv(room, items),)](
        work.items, contexts, work.rows, room, work.wanted, work.uneven, work.needed,
        ROWS=rows, ITEMS=items, UNIT=work.tile.keys, LEAST=work.tile.least,
        WINDOW=window, num_warps=warps, **_early(contexts.device),
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


def warp_groups(spec: AttentionSpec, layout: AxesLayout, device: torch.device) -> PrefillTile | None:
    """The tile of prompts for the kernel whose warp groups fetch and multiply side by side, where it can run.

    It needs Hopper's matrix unit, a cache of two bytes an element as all else has, and tiles that lie in one block.
    """
    if spec.batch_invariant or not is_hopper(device):
        return None
    plain = spec.dtype == spec.kv_dtype and spec.dtype.itemsize == 2 and layout == TOKEN_MAJOR(spec, layout.block_size)
    if not plain or spec.head_size not in (64, 128, 256) or spec.group not in (1, 2, 4, 8, 16, 32, 64):
        return None
    keys = 128 if spec.head_size < 256 and layout.block_size % 128 == 0 else 64
    if layout.block_size % keys:
        return None
    stages = _GROUPS_BYTES // (4 * keys * spec.head_size)
    return PrefillTile(queries=hopper.QUERIES, keys=keys, warps=4, stages=min(stages, 4))


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
        tile, room = work.tile, work.items.shape[1]
        kernels.decode[(self.spec.kv_heads * room,)](
            **self._arguments(out, query, cache, layer),
            table=plan.table, contexts=plan.contexts, items=work.items, partial=work.scratch.partial,
            arrived=work.scratch.arrived,
            width=plan.table.shape[1], room=room, HEADS=max(16, triton.next_power_of_2(self.spec.group)),
            TILE=tile.keys, STAGES=tile.stages, JOINED=_joined(self.spec), num_warps=tile.warps,
        )  # fmt: skip

    def prefill(
        self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, tiles: Tensor, shape: PrefillTile, layer: int
    ) -> None:
        """Into the tokens of `out` that belong to the tiles' rows."""
        room = tiles.shape[1]
        kernels.prefill[(self.spec.kv_heads * room,)](
            **self._arguments(out, query, cache, layer),
            table=plan.table, query_starts=plan.query_starts, contexts=plan.contexts, tiles=tiles,
            width=plan.table.shape[1], room=room, QUERIES=shape.queries, TILE=shape.keys, STAGES=shape.stages,
            INVARIANT=self.spec.batch_invariant, num_warps=shape.warps,
        )  # fmt: skip

    def prefill_by_warp_groups(
        self, out: Tensor, query: Tensor, cache: KVCache, plan: Plan, tiles: Tensor, shape: PrefillTile, layer: int
    ) -> None:
        """As `prefill`, with a shape from `warp_groups`."""
        spec, room = self.spec, tiles.shape[1]
        tile = [shape.keys, spec.head_size]
        dtype = gluon.language.bfloat16 if spec.dtype == torch.bfloat16 else gluon.language.float16
        where = gluon.language.NVMMASharedLayout.get_default_for(tile, dtype)
        keys, values = (
            TensorDescriptor.from_tensor(tensor[layer].view(-1, spec.kv_heads * spec.head_size), tile, where)
            for tensor in (cache.keys, cache.values)
        )
        hopper.prefill[(spec.kv_heads * room,)](
            out, query, keys, values, plan.table, plan.query_starts, plan.contexts, tiles,
            out if self.sinks is None else self.sinks[layer],
            query.stride(0), query.stride(1), plan.table.shape[1], room, spec.scale,
            KV_HEADS=spec.kv_heads, GROUP=spec.group, SIZE=spec.head_size, BLOCK_SIZE=self.layout.block_size,
            WINDOW=spec.window, SOFTCAP=spec.softcap, SINKS=spec.sinks, TILE=shape.keys, STAGES=shape.stages,
            num_warps=shape.warps,
        )  # fmt: skip


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
