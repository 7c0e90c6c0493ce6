"""The kernels in Triton's interpreter, on a machine without a GPU: conformance, and long contexts in many parts."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.conformance import Suite
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.stage import Stage
from octavo_triton import launch
from octavo_triton.plan import Decodes, Scratch
from tests.backends.triton.interpreted import PROCESSORS, TILE, FlashDecoding, Interpreted, Paged
from tests.backends.triton.interpreter import OutOfBounds


class TestFlashDecoding(Suite):
    backend: ClassVar[type[AttentionBackend]] = FlashDecoding


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


@settings(max_examples=30, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    window=st.one_of(st.none(), st.integers(1, 500)),
    wanted=st.integers(1, 40),
    uneven=st.integers(1, 40),
    needed=st.integers(1, 40),
)
def test_parts_cover_each_context_once(
    contexts: list[int], window: int | None, wanted: int, uneven: int, needed: int
) -> None:
    """And no more parts are made than there is room for, however the tokens are spread."""
    room = max(wanted, uneven) + len(contexts)
    nothing = Scratch(torch.empty(0), torch.empty(0))
    work = Decodes(len(contexts), TILE, wanted, uneven, needed, torch.full((5, room), -7, dtype=torch.int32), nothing)
    launch.split(work, torch.tensor(contexts, dtype=torch.int32), window)
    found = items_of(work)
    for row, context in enumerate(contexts):
        own = [item for item in found if item[0] == row]
        assert [part for _, _, _, part, _ in own] == list(range(len(own)))
        assert {parts for *_, parts in own} == {len(own)}
        assert all(first % TILE.keys == 0 or first == context for _, first, *_ in own)
        edges = [own[0][1], *(end for _, _, end, _, _ in own)]
        assert edges == sorted(edges)
        assert edges[1:-1] == [first for _, first, *_ in own[1:]]
        assert edges[-1] == context
        oldest = 0 if window is None else max(context - window, 0)
        assert edges[0] == min(oldest // TILE.keys * TILE.keys, context)
    assert len(found) <= room
    assert (work.items[0][len(found) :] == -1).all()


def items_of(work: Decodes) -> list[tuple[int, ...]]:
    return [tuple(item) for item in work.items.T.tolist() if item[0] >= 0]


@pytest.mark.parametrize(
    ("contexts", "longest"),
    [([4096, *[16] * 60], 32), ([1600] * 16, 800), ([64] * 96, 64), ([6400], 200)],
    ids=["one long among short ones", "even, in two parts", "even", "one alone"],
)
def test_uneven_contexts_alone_are_split_further(contexts: list[int], longest: int) -> None:
    """A long one among short ones is not left in parts that take as long as many of the short ones."""
    wanted, uneven = 32, 160
    items = torch.empty(5, uneven + len(contexts), dtype=torch.int32)
    nothing = Scratch(torch.empty(0), torch.empty(0))
    work = Decodes(len(contexts), TILE, wanted, uneven, 8, items, nothing)
    launch.split(work, torch.tensor(contexts, dtype=torch.int32), None)
    assert max(end - first for _, first, end, *_ in items_of(work)) == -(-longest // TILE.keys) * TILE.keys


def test_eight_processors_are_kept_busy() -> None:
    stage = Stage(FlashDecoding, plain(heads=1, kv_heads=1), CPU(), 0)
    step = stage.step([(stage.row(PROCESSORS * TILE.keys), 1)])
    assert len(items_of(stage.backend.plan(step.batch).decodes)) >= PROCESSORS
