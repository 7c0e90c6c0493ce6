"""Prompts against dense float64 attention, at the lengths at which PyTorch's kernel takes several tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo_cpu.backend import FlashDecodingBackend

ROWS = [(1, 40), (1, 1), (600, 600), (0, 50), (300, 900), (2, 700), (5, 5), (33, 1025)]
"""New tokens and context: decoding, then new prompts, an idle row, and tokens behind a context."""


def spec_of(window: int | None, softcap: float | None, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        layers=1, heads=6, kv_heads=2, head_size=32, scale=0.3, dtype=dtype, kv_dtype=dtype, window=window,
        softcap=softcap,
    )  # fmt: skip


def dense(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last tokens' queries [length, heads, size] over [context, kv_heads, size], in float64."""
    key, value = (held.double().repeat_interleave(spec.group, dim=1) for held in (key, value))
    scores = torch.einsum("qhd,chd->hqc", query.double(), key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    scores = scores.masked_fill((behind < 0) | (behind >= (spec.window or len(key))), -torch.inf)
    return torch.einsum("hqc,chd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 5.0)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_rows_of_all_kinds_in_one_step(
    block_size: int, window: int | None, softcap: float | None, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(block_size)
    spec = spec_of(window, softcap, dtype)
    backend = FlashDecodingBackend(spec, block_size, CPU())
    width = -(-max(context for _, context in ROWS) // block_size)
    cache = backend.layout.allocate(len(ROWS) * width + 1, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    table = (torch.randperm(len(ROWS) * width) + 1).int().view(len(ROWS), width)
    starts = [0, *torch.tensor([new for new, _ in ROWS]).cumsum(0).tolist()]
    owned = [slice(start, end) for start, end in pairwise(starts)]
    # Heads lie beside those of keys, as in a model whose projections are one.
    query, own_keys, own_values = torch.randn(starts[-1], 10, 32).to(dtype).split([6, 2, 2], dim=1)
    truth = []
    for row, (own, (new, context)) in enumerate(zip(owned, ROWS, strict=True)):
        old_keys, old_values = torch.randn(2, context - new, 2, 32).to(dtype)
        key, value = torch.cat([old_keys, own_keys[own]]), torch.cat([old_values, own_values[own]])
        token = torch.arange(context)
        slots = table[row, token // block_size].long() * block_size + token % block_size
        backend.layout.write(cache, 0, key, value, slots)
        truth.append(dense(spec, query[own], key, value))
    batch = AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.tensor([context for _, context in ROWS], dtype=torch.int32), block_table=table,
        slots=torch.full((starts[-1],), -1), max_query=600, max_context=1025, decodes=2,
    )  # fmt: skip
    out = backend.attend(query, own_keys, own_values, cache, backend.plan(batch), 0)
    for own, expected in zip(owned, truth, strict=True):
        assert (out[own] - expected).norm() <= limit * expected.norm()
