"""The kernels in Triton's interpreter, on a machine without a GPU: conformance, and long contexts in many parts."""

from __future__ import annotations

import heapq
from math import ceil
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.conformance import Suite
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.stage import Stage
from octavo_triton import launch
from octavo_triton.plan import FIELDS, Decodes, Scratch
from tests.backends.triton.interpreted import PROCESSORS, TILE, FlashDecoding, Interpreted, Paged
from tests.backends.triton.interpreter import OutOfBounds

# A capped logit of 1e5 has an infinite exponential, as the kernels mean it to have: numpy warns of it, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

BEGUN, JOINING = 64, 3 * 48
"""What an item costs before its first token, and joining a few rounds of parts, in tokens."""


class TestFlashDecoding(Suite):
    backend: ClassVar[type[AttentionBackend]] = FlashDecoding
    left_out = ("generation",)


def test_a_read_beside_all_tensors_is_seen() -> None:
    stage = Stage(FlashDecoding, plain(), CPU(), 0)
    row = stage.row(20)
    step = stage.step([(row, 1)])
    stage.write(step)
    plan = stage.backend.plan(step.batch)
    plan.table.fill_(10**6)
    with pytest.raises(Exception, match=OutOfBounds.__name__):
        stage.attend(step, plan)


def plain(**changed: object) -> Configuration:
    fields: dict[str, object] = {
        "head_size": 32, "block_size": 16, "dtype": torch.float32, "kv_dtype": torch.float32, "layers": 1,
    }  # fmt: skip
    return Configuration(**(fields | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [FlashDecoding, Paged])
@pytest.mark.parametrize("window", [None, 150])
def test_one_long_context_among_short_ones(
    backend: type[Interpreted], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long one is many parts, more than are joined at a time; sinks count once, not once a part."""
    monkeypatch.setattr(launch, "_MOST_JOINED", 2)
    stage = Stage(backend, plain(window=window, sinks=True, dirt=Dirt.NAN, kv_heads=1), CPU(), 0)
    step = stage.step([(stage.row(length), 1) for length in (300, 5, 1, 33)])
    stage.run(step)
    parts = items_of(stage.backend.plan(step.batch).decodes)
    assert sum(row == 0 for row, *_ in parts) > 4


CONTEXTS = st.lists(st.integers(0, 3000), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None)
@given(
    contexts=CONTEXTS,
    window=st.one_of(st.none(), st.integers(1, 500)),
    wanted=st.integers(1, 40),
    finer=st.booleans(),
    few=st.integers(0, 60_000),
)
def test_parts_cover_each_context_once(
    contexts: list[int], window: int | None, wanted: int, finer: bool, few: int
) -> None:
    """And no more parts are made than there is room for, however the tokens are spread."""
    room = 6 * wanted + len(contexts) if finer else wanted + len(contexts) - 1
    work = decodes(contexts, wanted, room, few)
    table = torch.randperm(len(contexts) * 188, dtype=torch.int32).view(len(contexts), 188)
    launch.split(work, torch.tensor(contexts, dtype=torch.int32), table, 16, window)
    found = items_of(work)
    for row, context in enumerate(contexts):
        own = [item for item in found if item[0] == row]
        assert [part for _, _, _, part, *_ in own] == list(range(len(own)))
        assert {parts for *_, parts, _, _ in own} == {len(own)}
        assert all(first % TILE.keys == 0 or first == context for _, first, *_ in own)
        assert all(block == table[row, first // 16] for _, first, end, *_, block in own if first < end)
        edges = [own[0][1], *(end for _, _, end, *_ in own)]
        assert edges == sorted(edges)
        assert edges[1:-1] == [first for _, first, *_ in own[1:]]
        assert edges[-1] == context
        oldest = 0 if window is None else max(context - window, 0)
        assert edges[0] == min(oldest // TILE.keys * TILE.keys, context)
    assert len(found) <= room
    seen = sum(end - first for _, first, end, *_ in found)
    assert {streamed for *_, streamed, _ in found} == {int(seen <= few)}
    assert (work.items[len(found) :, 0] == -1).all()


def items_of(work: Decodes) -> list[tuple[int, ...]]:
    return [tuple(item[:-1]) for item in work.items.tolist() if item[0] >= 0]


def decodes(contexts: list[int], wanted: int, room: int, few: int = 0) -> Decodes:
    nothing = Scratch(torch.empty(0), torch.empty(0))
    return Decodes(len(contexts), TILE, wanted, few, torch.full((room, FIELDS), -7, dtype=torch.int32), nothing)


def seconds(lengths: list[int], wanted: int) -> int:
    """When the last item ends, if `wanted` run at a time, each a token a second, and begin in their order."""
    free = [0] * wanted
    for length in lengths:
        heapq.heapreplace(free, free[0] + length + BEGUN)
    return max(free)


def cut(contexts: list[int], share: int) -> list[int]:
    """Items of at most about `share` tokens, as even as tiles allow."""
    lengths = []
    for context in contexts:
        parts = max(1, ceil(context / share))
        even = ceil(ceil(context / parts) / TILE.keys) * TILE.keys
        lengths += [max(0, min(even, context - part * even)) for part in range(parts)]
    return lengths


@settings(max_examples=60, deadline=None)
@given(contexts=CONTEXTS, wanted=st.integers(2, 40))
@example(contexts=[4096, *[16] * 60], wanted=32)  # one long among short ones
@example(contexts=[1600] * 16, wanted=32)
@example(contexts=[2048] * 8, wanted=33)  # equal parts for all that run at a time would be a fifth part of each
@example(contexts=[64] * 96, wanted=32)
@example(contexts=[6400], wanted=32)
def test_hardly_another_share_is_done_sooner(contexts: list[int], wanted: int) -> None:
    """Of all lengths that parts could have, tried out one by one."""
    room = 6 * wanted + len(contexts)
    work = decodes(contexts, wanted, room)
    table = torch.zeros(len(contexts), 1, dtype=torch.int32)
    launch.split(work, torch.tensor(contexts, dtype=torch.int32), table, 1 << 14, None)
    taken = seconds([end - first for _, first, end, *_ in items_of(work)], wanted)
    tried = (cut(contexts, share) for share in range(TILE.keys, max(contexts) + TILE.keys, TILE.keys))
    best = min((seconds(lengths, wanted) for lengths in tried if len(lengths) <= room), default=BEGUN)
    assert taken <= 1.3 * best + JOINING


def test_eight_processors_are_kept_busy() -> None:
    stage = Stage(FlashDecoding, plain(heads=1, kv_heads=1), CPU(), 0)
    step = stage.step([(stage.row(PROCESSORS * TILE.keys), 1)])
    assert len(items_of(stage.backend.plan(step.batch).decodes)) >= PROCESSORS
