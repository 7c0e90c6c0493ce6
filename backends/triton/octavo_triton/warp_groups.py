"""Prompts by the kernel whose warp groups fetch and multiply side by side (kernels/hopper.py): its shapes and its call.

Importing it needs a Triton whose Gluon has what the kernel uses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import TOKEN_MAJOR, AxesLayout
from octavo_triton.kernels import hopper
from octavo_triton.plan import Plan
from octavo_triton.tuning import PrefillTile

_SHARED_BYTES = 160_000
"""Of a processor, for the tiles that are on their way."""


def tile(spec: AttentionSpec, layout: AxesLayout) -> PrefillTile | None:
    """Where it can run: with a cache of two bytes an element as all else has, and tiles that lie in one block."""
    plain = spec.dtype == spec.kv_dtype and spec.dtype.itemsize == 2 and layout == TOKEN_MAJOR(spec, layout.block_size)
    if not plain or spec.head_size not in (64, 128, 256) or spec.group not in (1, 2, 4, 8, 16, 32, 64):
        return None
    keys = 128 if spec.head_size < 256 and layout.block_size % 128 == 0 else 64
    if layout.block_size % keys:
        return None
    stages = _SHARED_BYTES // (4 * keys * spec.head_size)
    return PrefillTile(queries=hopper.QUERIES, keys=keys, warps=4, stages=min(stages, 4))


def prefill(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    tiles: Tensor,
    shape: PrefillTile,
    spec: AttentionSpec,
    block_size: int,
    sinks: Tensor | None,
) -> None:
    """Into the tokens of `out` that belong to the tiles' rows; keys, values: one layer's, token-major."""
    room, size = tiles.shape[1], [shape.keys, spec.head_size]
    dtype = gluon.language.bfloat16 if spec.dtype == torch.bfloat16 else gluon.language.float16
    where = gluon.language.NVMMASharedLayout.get_default_for(size, dtype)
    fetched = [
        TensorDescriptor.from_tensor(each.view(-1, spec.kv_heads * spec.head_size), size, where)
        for each in (keys, values)
    ]
    hopper.prefill[(spec.kv_heads * room,)](
        out, query, *fetched, plan.table, plan.query_starts, plan.contexts, tiles, out if sinks is None else sinks,
        query.stride(0), query.stride(1), plan.table.shape[1], room, spec.scale,
        KV_HEADS=spec.kv_heads, GROUP=spec.group, SIZE=spec.head_size, BLOCK_SIZE=block_size,
        WINDOW=spec.window, SOFTCAP=spec.softcap, SINKS=spec.sinks, TILE=shape.keys, STAGES=shape.stages,
        num_warps=shape.warps,
    )  # fmt: skip
