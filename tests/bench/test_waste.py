"""Reserved and unused slots: small cases computed by hand, and octavo's own count against one slot by slot."""

from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench import waste
from octavo.bench.exchange import Exchange
from octavo.bench.waste import Cache, Tally, contiguous, octavo, up_front
from octavo.bench.workload import Range, Source
from octavo.engine.scheduler import Schedule, Scheduler


def cache(tokens: int, max_total: int = 8, max_new: int = 3, budget: int = 64) -> Cache:
    return Cache(
        cache_tokens=tokens, max_total_tokens=max_total, max_new_tokens=max_new, max_batch_prefill_tokens=budget
    )


THREE = [Exchange([1, 2], 2), Exchange([3, 4], 2), Exchange([5, 6], 2)]
"""Each writes 2 slots in its first step and a third in its second, which is its last."""


def counted(tally: Tally) -> list[tuple[float, int, int]]:
    return list(zip(tally.unused_shares, tally.used, tally.running, strict=True))


def test_contiguous() -> None:
    """Two of 4 slots each fill the cache of 8; the third runs alone and is not counted: nobody waits."""
    tally = contiguous(THREE, cache(8, max_total=4))
    assert (counted(tally), tally.steps) == ([(0.5, 4, 2), (0.25, 6, 2)], 4)


def test_up_front() -> None:
    """2 + 3 - 1 slots are 2 blocks of 2; of the cache's 6 blocks one is nobody's, so that two requests fit."""
    tally = up_front(THREE, cache(12), block_size=2)
    assert (counted(tally), tally.steps) == ([(0.5, 4, 2), (0.25, 6, 2)], 4)
    assert up_front(THREE, cache(14), block_size=2).steps == 2, "three fit into 6 others"


def test_octavo() -> None:
    """One block each at first, and a second one for the third slot."""
    served = octavo(THREE, cache(10), block_size=2)
    assert (counted(served.tally), served.tally.steps) == ([(0.0, 4, 2), (0.25, 6, 2)], 4)
    assert (served.preemptions, served.recomputed_tokens, served.cached_tokens) == (0, 0, 0)


def test_prompts_take_turns_at_the_budget() -> None:
    """6 and 4 prompt tokens at 5 a step: 5; 1 and 4, at which the first has its one token; nobody waits then."""
    tally = contiguous([Exchange(range(6), 1), Exchange(range(4), 1)], cache(16, budget=5))
    assert (counted(tally), tally.steps) == ([(3 / 8, 5, 1)], 2)


def test_octavo_preempts_and_counts_what_it_computes_again() -> None:
    """32 blocks of 1 for two requests that come to need 30: both run until they hold 16 each.

    Then the newer gives way and loses 14 blocks to the older in as many steps, and returns for its last 14 tokens.
    """
    served = octavo([Exchange([1], 30), Exchange([2], 30)], cache(33, max_total=31, max_new=30), block_size=1)
    alone = [(0.0, used, 1) for used in range(17, 31)]
    assert (counted(served.tally), served.tally.steps) == (alone, 16 + 14 + 14)
    assert (served.preemptions, served.recomputed_tokens) == (1, 14)


def test_octavo_computes_a_shared_prompt_once() -> None:
    """All of it but the last token, which is always computed."""
    served = octavo([Exchange(range(5), 1), Exchange(range(5), 2)], cache(64), block_size=2)
    assert (served.cached_tokens, served.recomputed_tokens) == (4, 0)


def test_a_cache_for_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="never made a request wait"):
        waste.rows(THREE, cache(1000), [2])


def test_a_cache_for_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="one request reserves 8 slots and the cache has 7"):
        contiguous(THREE, cache(7))


def slot_by_slot(scheduler: Scheduler, schedule: Schedule) -> tuple[int, int]:
    """Reserved and written slots, each by its number."""
    size = scheduler.kv.block_size
    ends = {row.request.id: row.start + row.count for row in schedule.rows}
    reserved: set[int] = set()
    written: set[int] = set()
    for request in scheduler.running:
        assert request.table is not None
        slots = np.add.outer(request.table.blocks * size, np.arange(size)).reshape(-1)
        reserved.update(slots.tolist())
        written.update(slots[: ends.get(request.id, request.computed)].tolist())
    return len(reserved), len(written)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
exchanges = st.lists(st.builds(Exchange, prompts, st.integers(1, 8)), min_size=4, max_size=20)


@given(exchanges, st.sampled_from([1, 2, 4]), st.integers(3, 40))
@settings(max_examples=150, deadline=None)
def test_shared_slots_count_once(requests: list[Exchange], block_size: int, budget: int) -> None:
    """Two words make prompts that share whole blocks and parts of blocks."""
    truth: list[tuple[int, int]] = []
    steps: list[tuple[int, int]] = []

    class Watched(Tally):
        def add(self, reserved: int, used: int, running: int) -> None:
            steps.append((reserved, used))

    def watched(scheduler: Scheduler, schedule: Schedule) -> int:
        truth.append(slot_by_slot(scheduler, schedule))
        return real(scheduler, schedule)

    real = waste._written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waste, "_written", watched)
        patch.setattr(waste, "Tally", Watched)
        octavo(requests, cache(32, max_total=20, max_new=8, budget=budget), block_size)
    assert steps == truth


@pytest.fixture(scope="module")
def drawn() -> list[Exchange]:
    return Source(None, 50_000).conversations(400, Range(4, 1024), 1024, seed=0)


def test_octavo_wastes_little(drawn: list[Exchange]) -> None:
    """Under 4 % at block size 16, and no other way runs as many at once."""
    whole, ahead, ours = waste.rows(drawn, cache(16384, 2048, 1024, 4096), [16])
    assert (whole["reservation"], ahead["reservation"], ours["reservation"]) == ("contiguous", "up front", "octavo")
    shares = [row["unused_percent"] for row in (whole, ahead, ours)]
    assert shares[2] < 4 < 50 < shares[1] < shares[0]  # type: ignore[operator]
    assert ours["running_requests_ratio_to_up_front"] > 2  # type: ignore[operator]


def test_the_same_every_time(drawn: list[Exchange]) -> None:
    found = [waste.rows(drawn[:80], cache(8192, 2048, 1024, 4096), [16, 64]) for _ in range(2)]
    assert found[0] == found[1]


def test_a_row_is_the_average_of_the_steps() -> None:
    tally = contiguous(THREE, cache(8, max_total=4))
    assert tally.row("contiguous", None, cache(8, max_total=4)) == {
        "reservation": "contiguous",
        "block_size_tokens": None,
        "unused_percent": 100 * mean([0.5, 0.25]),
        "used_percent_of_cache": 100 * mean([4, 6]) / 8,
        "running_requests": 2,
        "steps": 4,
    }
