"""The C++ kernel against dense float64 attention: what the conformance suite's short contexts do not reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo_cpu.backend import FlashDecodingBackend

THREADS = 8
"""What the backend is told: more than there are, so that contexts are split."""

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)


def spec_of(
    heads: int, kv_heads: int, size: int, window: int | None, softcap: float | None, sinks: bool,
    batch_invariant: bool = False, kv_dtype: torch.dtype = torch.float32, alibi: bool = False,
) -> AttentionSpec:  # fmt: skip
    slopes = tuple(2.0 ** -(5 + head) for head in range(heads))  # so small that distant keys keep some weight
    return AttentionSpec(
        layers=1, heads=heads, kv_heads=kv_heads, head_size=size, scale=size**-0.5, dtype=torch.float32,
        kv_dtype=kv_dtype, window=window, softcap=softcap, sinks=sinks, batch_invariant=batch_invariant,
        alibi_slopes=slopes if alibi else None,
    )  # fmt: skip


def dense(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """One query token [heads, size] after its keys and values [context, kv_heads, size], in float64."""
    seen = slice(max(0, len(key) - spec.window) if spec.window else 0, None)
    key, value = (kept[seen].double().repeat_interleave(spec.group, dim=1) for kept in (key, value))
    scores = torch.einsum("hd,chd->hc", query.double(), key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi_slopes is not None:
        scores += torch.tensor(spec.alibi_slopes).double()[:, None] * torch.arange(1 - len(key), 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    weights = scores.softmax(1)[:, : len(key)]
    return torch.einsum("hc,chd->hd", weights, value)


def decode(
    spec: AttentionSpec, block_size: int, contexts: Sequence[int], sinks: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """What the backend gives for one token of each row, the truth, and into how many parts a context was split."""
    backend = FlashDecodingBackend(spec, block_size, CPU(), None, None if sinks is None else sinks[None])
    widest = max(-(-context // block_size) for context in contexts)
    cache = backend.layout.allocate(len(contexts) * widest + 1, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    table = (torch.randperm(len(contexts) * widest) + 1).int().view(len(contexts), widest)
    query = torch.randn(len(contexts), spec.heads, spec.head_size)
    truth = []
    for row, context in enumerate(contexts):
        key, value = torch.randn(2, context, spec.kv_heads, spec.head_size).to(spec.kv_dtype)
        tokens = torch.arange(context)
        backend.layout.write(
            cache, 0, key, value, table[row, tokens // block_size].long() * block_size + tokens % block_size
        )
        truth.append(dense(spec, query[row], key, value, sinks))
    batch = AttentionBatch(
        query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32), block_table=table,
        slots=torch.full((len(contexts),), -1), max_query=1, max_context=max(contexts), decodes=len(contexts),
    )  # fmt: skip
    plan = backend.plan(batch)
    empty = query[:, : spec.kv_heads]
    return backend.attend(query, empty, empty, cache, plan, 0), torch.stack(truth), plan.decode.parts


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("block_size", [1, 16, 100, 256])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("alibi", [False, True])
def test_long_contexts_are_split_and_joined(block_size: int, window: int | None, alibi: bool) -> None:
    torch.manual_seed(block_size)
    spec = spec_of(4, 2, 64, window, None, sinks=True, alibi=alibi)
    out, truth, parts = decode(spec, block_size, [3000, 1, 1025], torch.randn(4))
    assert parts > 1
    assert (out - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("invariant", [True, False])
def test_a_row_whose_bits_are_its_own_affair_is_not_split_by_how_many_there_are(invariant: bool) -> None:
    """The parts' sums are taken in another order than one."""
    spec = spec_of(4, 2, 64, None, None, sinks=False, batch_invariant=invariant)
    out, truth, parts = decode(spec, 32, [3000, 1], None)
    assert (out - truth).norm() < 1e-5 * truth.norm()
    assert (parts == 1) == invariant


@settings(deadline=None, max_examples=40)
@given(
    kv_heads=st.integers(1, 3), group=st.integers(1, 9), lanes=st.integers(1, 33),
    block_size=st.sampled_from([1, 3, 8, 32]),
    contexts=st.lists(st.integers(1, 70), min_size=1, max_size=4), window=st.one_of(st.none(), st.integers(1, 80)),
    softcap=st.sampled_from([None, 5.0]), sinks=st.booleans(), alibi=st.booleans(),
    kv_dtype=st.sampled_from(KV_DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(
    kv_heads: int, group: int, lanes: int, block_size: int, contexts: list[int], window: int | None,
    softcap: float | None, sinks: bool, alibi: bool, kv_dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    spec = spec_of(kv_heads * group, kv_heads, lanes * 8, window, softcap, sinks, kv_dtype=kv_dtype, alibi=alibi)
    out, truth, _ = decode(spec, block_size, contexts, torch.randn(kv_heads * group) if sinks else None)
    assert (out - truth).norm() < 1e-5 * truth.norm()


def test_slopes_are_float32_whatever_the_default_is() -> None:
    """The kernel reads them as such."""
    spec = spec_of(4, 2, 8, None, None, sinks=False, alibi=True)
    torch.manual_seed(0)
    truth = decode(spec, 16, [50], None)[1]
    torch.set_default_dtype(torch.float64)
    try:
        backend = FlashDecodingBackend(spec, 16, CPU())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decode.__globals__, "FlashDecodingBackend", lambda *_: backend)
        out = decode(spec, 16, [50], None)[0]
    assert (out - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_is_widened_as_it_is(dtype: torch.dtype) -> None:
    """The only token of a context has all the weight; infinities and NaN are values too."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).view(1, 128, 512)
    backend = FlashDecodingBackend(spec_of(128, 128, 512, None, None, sinks=False, kv_dtype=dtype), 16, CPU())
    cache = backend.layout.allocate(2, torch.device("cpu"))
    backend.layout.write(cache, 0, torch.zeros_like(values), values, torch.tensor([16]))
    one = torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1], dtype=torch.int32), context_lengths=one, block_table=one[None],
        slots=torch.tensor([-1]), max_query=1, max_context=1, decodes=1,
    )  # fmt: skip
    query = torch.ones(1, 128, 512)
    torch.testing.assert_close(
        backend.attend(query, query, query, cache, backend.plan(batch), 0),
        values.float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_weights_of_very_different_size_come_out_right() -> None:
    torch.manual_seed(0)
    spec = spec_of(1, 1, 8, None, None, sinks=False)
    for factor in (1e-3, 1.0, 30.0, 300.0):
        scaled = AttentionSpec(
            layers=1, heads=1, kv_heads=1, head_size=8, scale=factor, dtype=spec.dtype, kv_dtype=spec.kv_dtype
        )
        out, truth, _ = decode(scaled, 16, [50], None)
        assert (out - truth).norm() < 1e-5 * truth.norm(), factor


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in (FlashDecodingBackend.probe(CPU()) or "")
