"""One backend for prefill and another for decode, over one cache."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, HostLengths
from octavo.attention.device import CPU
from octavo.attention.phases import PhasedBackend, disagreement, phased, split
from octavo.kv.layout import HEAD_MAJOR, TOKEN_MAJOR
from octavo_reference.backend import ReferenceBackend
from tests.distributions import backend, capabilities, spec

ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=6)
"""Query tokens of a row, and keys that earlier steps wrote."""


def packed(rows: list[tuple[int, int]], block_size: int = 4) -> AttentionBatch:
    """Rows with blocks of their own, those that decode first."""
    rows = sorted(rows, key=lambda row: row[0] != 1)
    width = max(-(-sum(row) // block_size) for row in rows)
    table = torch.arange(1, len(rows) * width + 1, dtype=torch.int32).view(len(rows), width)
    slots = [
        int(table[index, at // block_size]) * block_size + at % block_size
        for index, (new, old) in enumerate(rows)
        for at in range(old, old + new)
    ]
    host = HostLengths(
        np.cumsum([0, *(new for new, _ in rows)], dtype=np.int32), np.array(list(map(sum, rows)), np.int32)
    )
    return AttentionBatch(
        query_starts=torch.tensor(host.query_starts),
        context_lengths=torch.tensor(host.context_lengths),
        block_table=table,
        slots=torch.tensor(slots),
        max_query=max(new for new, _ in rows),
        max_context=max(map(sum, rows)),
        decodes=sum(new == 1 for new, _ in rows),
        host_lengths=host,
    )


@settings(deadline=None)
@given(ROWS)
def test_split_cuts_between_rows(rows: list[tuple[int, int]]) -> None:
    batch = packed(rows)
    parts = [part for part in split(batch) if part is not None]
    assert sum(part.rows for part in parts) == batch.rows
    assert torch.equal(torch.cat([part.slots for part in parts]), batch.slots)
    assert torch.equal(torch.cat([part.block_table for part in parts]), batch.block_table)
    assert torch.equal(torch.cat([part.context_lengths for part in parts]), batch.context_lengths)
    lengths = torch.cat([part.query_starts.diff() for part in parts])
    assert torch.equal(lengths, batch.query_starts.diff())
    for part in parts:
        assert part.query_starts[0] == 0
        assert part.query_starts[-1] == len(part.slots)
        assert part.max_query == part.query_starts.diff().max()
        assert part.decodes == (part.rows if part.max_query == 1 else 0)
        assert part.host_lengths is not None
        assert part.host_lengths.query_starts.tolist() == part.query_starts.tolist()
        assert part.host_lengths.context_lengths.tolist() == part.context_lengths.tolist()
        assert part.slots.data_ptr() in (batch.slots.data_ptr(), batch.slots[batch.decodes :].data_ptr())


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one row's last tokens in float64: [n, heads, size] of keys [m, kv_heads, size]."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = scale * torch.einsum("nhd,mhd->hnm", query.double(), key)
    late = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(late, -torch.inf).softmax(-1), value)


class Other(ReferenceBackend):
    """Distinguishable from the reference backend by its output's sign."""

    name = "other"

    def attend(self, *arguments: Any) -> Tensor:
        return -super().attend(*arguments)


@settings(deadline=None)
@given(ROWS, st.integers(0, 2**30))
def test_each_row_meets_its_backend(rows: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, group = packed(rows), spec()
    made = phased(ReferenceBackend, Other)(group, 4, CPU())
    cache = made.layout.allocate(int(batch.block_table.max()) + 1, torch.device("cpu"))
    history = [torch.randn(2, int(length), 2, 8, generator=generator) for length in batch.context_lengths]
    for row, (key, value) in enumerate(history):
        at = torch.arange(len(key))
        made.layout.write(cache, 1, key, value, batch.block_table[row, at // 4].long() * 4 + at % 4)
    query = torch.randn(len(batch.slots), 4, 8, generator=generator)
    starts = batch.query_starts.tolist()
    new = [
        pair[:, pair.shape[1] - (end - start) :] for pair, start, end in zip(history, starts, starts[1:], strict=False)
    ]
    key, value = torch.cat(new, 1)
    output = made.attend(query, key, value, cache, made.plan(batch), 1)
    for row, (keys, values) in enumerate(history):
        expected = dense(query[starts[row] : starts[row + 1]], keys, values, group.scale)
        sign = -1 if row < batch.decodes else 1
        torch.testing.assert_close(
            output[starts[row] : starts[row + 1]].double(), sign * expected, rtol=1e-5, atol=1e-5
        )


def test_the_cache_must_be_shared() -> None:
    ours, theirs = backend("ours"), backend("theirs", layout_type=HEAD_MAJOR)
    assert disagreement(ours, backend("same"), spec(), 16, CPU()) is None
    assert "layouts differ" in (disagreement(ours, theirs, spec(), 16, CPU()) or "")
    with pytest.raises(ValueError, match="layouts differ"):
        phased(ours, theirs)(spec(), 16, CPU())
    with pytest.raises(ValueError, match="decode=test/ours: block size 7 is not supported"):
        phased(backend("any", can={"block_sizes": (...,)}), ours)(spec(), 7, CPU())


class Optional(ReferenceBackend):
    layout_type = TOKEN_MAJOR

    def __init__(self, spec: Any, block_size: int, device: Any, options: Any = None, sinks: Any = None) -> None:
        super().__init__(spec, block_size, device, None, sinks)
        self.options = options


def test_options_and_sinks_reach_their_phase() -> None:
    sinks = torch.zeros(2, 4)
    made = phased(Optional, Optional)(spec(sinks=True), 16, CPU(), {"decode": {"splits": 4}}, sinks)
    assert isinstance(made.prefill, Optional)
    assert isinstance(made.decode, Optional)
    assert (made.prefill.options, made.decode.options) == (None, {"splits": 4})
    assert made.prefill.sinks is made.decode.sinks is sinks
    with pytest.raises(ValueError, match="given as prefill and decode, got splits"):
        phased(Optional, Optional)(spec(), 16, CPU(), {"splits": 4})


def replaying(safe: bool) -> type[AttentionBackend]:
    """A backend whose plan of a bucket is refreshed in place, or is new each time."""

    def plan(self: Any, batch: AttentionBatch, bucket: int | None = None) -> object:
        kept: object = vars(self).setdefault("kept", object())
        return kept if safe and bucket is not None else object()

    return backend(can={"graphs": "all"}, plan=plan)


@pytest.mark.parametrize("safe", [True, False])
def test_replay_is_as_safe_as_the_decoding_backend_says(safe: bool) -> None:
    made = phased(replaying(not safe), replaying(safe))(spec(), 16, CPU())
    decodes, mixed = packed([(1, 3), (1, 5)], 16), packed([(1, 3), (2, 5)], 16)
    assert isinstance(made, PhasedBackend)
    assert (made.plan(decodes, 2) is made.plan(decodes, 2)) is safe
    assert made.plan(decodes) is not made.plan(decodes)
    assert made.plan(mixed, 2) is not made.plan(mixed, 2)


def test_common_capabilities() -> None:
    prefill = backend(
        "a", can={"block_sizes": (64, ...), "head_sizes": (64, 128), "prefix_caching": True, "spare_slots": 1}
    )
    decode = backend("b", can={"block_sizes": (16, 32), "head_sizes": (128, 256, ...), "graphs": "all"})
    assert phased(prefill, decode).capabilities == capabilities(
        block_sizes=(16, 32), head_sizes=(128, 64), prefix_caching=True, spare_slots=1, graphs="decode"
    )
    invariant = backend("a", can={"batch_invariant": True})
    assert not phased(invariant, invariant).capabilities.batch_invariant
    assert not phased(decode, prefill).capabilities.prefix_caching
    assert phased(decode, prefill).capabilities.graphs == "none"


def test_two_backends_cannot_promise_that_a_token_has_the_same_bits_in_both_phases() -> None:
    first, second = (backend(name, can={"batch_invariant": True}) for name in "ab")
    assert disagreement(first, second, spec(), 16, CPU()) is None
    assert "give a token different bits" in (disagreement(first, second, spec(batch_invariant=True), 16, CPU()) or "")
