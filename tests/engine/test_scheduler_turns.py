"""Who runs next, and who has to wait: budgets, limits, preemption, and TGI's knobs."""

from typing import Any

import pytest

from octavo.engine.request import FinishReason, Request
from octavo.engine.scheduler import RequestRefused
from tests.engine.scheduling import Bench, prompt_of, settle


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [
        (31, 1, ["31 tokens", "limit is 30", "max_input_tokens", "shorten"]),
        (20, 21, ["20 prompt tokens", "21 new ones", "41", "limit is 40", "max_total_tokens", "at most 20"]),
    ],
)
def test_a_request_over_a_limit_is_refused_with_the_numbers(prompt: int, max_tokens: int, numbers: list[str]) -> None:
    bench = Bench(max_input_tokens=30, max_total_tokens=40)
    with pytest.raises(RequestRefused) as refusal:
        bench.submit(prompt_of(prompt), max_tokens)
    for number in numbers:
        assert number in str(refusal.value)
    bench.check()


@pytest.mark.parametrize(("spare", "longest"), [(0, 40), (1, 39), (4, 36)])
def test_a_request_larger_than_the_cache_is_refused_one_that_just_fits_runs(spare: int, longest: int) -> None:
    bench = Bench(block_size=4, blocks=10, spare_slots=spare)
    with pytest.raises(RequestRefused, match=rf"{longest + 1} tokens need 11 blocks of 4, the whole cache has 10: .*"):
        bench.submit(prompt_of(30), longest + 1 - 30)
    bench.check()
    request = bench.submit(prompt_of(30), longest - 30)
    settle(bench)
    assert request.length == longest
    assert bench.ended[request.id] is FinishReason.LENGTH


def test_prompts_are_computed_in_chunks_beside_those_that_decode() -> None:
    bench = Bench(blocks=200, max_batch_prefill_tokens=32)
    decoding = bench.submit(prompt_of(10), 50)
    bench.step()
    bench.submit(prompt_of(100, 1), 5)
    counts = []
    for _ in range(4):
        rows = bench.step().rows
        assert (rows[0].request, rows[0].count) == (decoding, 1)
        counts.append(rows[1].count)
    assert counts == [32, 32, 32, 4]
    settle(bench)


def test_where_those_that_decode_count_too_prompts_get_what_they_leave() -> None:
    bench = Bench(blocks=200, max_batch_prefill_tokens=32, max_batch_size=32, counts_decodes=True)
    for start in range(3):
        bench.submit(prompt_of(10, start), 50)
    bench.step()
    bench.submit(prompt_of(100, 3), 5)
    assert [[row.count for row in bench.step().rows] for _ in range(5)] == [
        [1, 1, 1, 29], [1, 1, 1, 29], [1, 1, 1, 29], [1, 1, 1, 13], [1, 1, 1, 1],
    ]  # fmt: skip
    settle(bench)


@pytest.mark.parametrize("blocks", [14, 200])
def test_whole_prompts_are_computed_in_one_step_or_not_yet(blocks: int) -> None:
    """A prompt that comes back from preemption too, with what it had generated."""
    bench = Bench(blocks=blocks, prefix_caching=False, max_batch_prefill_tokens=48, whole_prompts=True)
    requests = [bench.submit(prompt_of(length, length), 24) for length in (20, 12, 1, 22)]
    while bench.open:
        for row in bench.step().rows:
            assert row.start + row.count == row.request.length - 1, "its next token followed"
    assert [len(request.generated) for request in requests] == [24] * 4
    assert (bench.scheduler.preemptions > 0) == (blocks == 14)


def test_the_budget_goes_to_the_oldest_first() -> None:
    bench = Bench(blocks=200, max_batch_prefill_tokens=32)
    requests = [bench.submit(prompt_of(20, start)) for start in range(4)]
    counts = [{row.request.id: row.count for row in bench.step().rows} for _ in range(3)]
    assert counts == [{0: 20, 1: 12}, {0: 1, 1: 8, 2: 20, 3: 4}, {0: 1, 1: 1, 2: 1, 3: 16}]
    settle(bench)
    assert [len(request.generated) for request in requests] == [4] * 4


def test_no_more_run_at_once_than_max_batch_size() -> None:
    bench = Bench(blocks=200, max_batch_size=3)
    for start in range(8):
        bench.submit(prompt_of(10, start), 4 + start)
    most = 0
    while bench.open:
        most = max(most, len(bench.step().rows))
    assert most == 3


def test_a_large_request_is_not_starved_by_a_flood_of_small_ones() -> None:
    """It is next once those before it have ended: what came later does not pass it, though it would fit."""
    bench = Bench(block_size=4, blocks=40)
    for start in range(8):
        bench.submit(prompt_of(8, start), 12)
    bench.step()
    large = bench.submit(prompt_of(130, 50), 4)
    waited = 0
    while not bench.is_running(large):
        bench.submit(prompt_of(4, 60 + waited), 12)
        bench.step()
        waited += 1
    assert waited <= 13
    settle(bench)


def test_the_newest_is_preempted_and_keeps_its_place() -> None:
    bench = Bench(block_size=4, blocks=12)
    old, new = (bench.submit(prompt_of(15, start), 30) for start in (0, 1))
    bench.until(lambda: bench.scheduler.preemptions == 1)
    assert bench.is_running(old)
    assert bench.scheduler.waiting == [new]
    later = bench.submit(prompt_of(15, 2), 2)
    assert bench.scheduler.waiting == [new, later]
    known = new.length
    bench.until(lambda: bench.is_running(new))
    assert bench.ended == {old.id: FinishReason.LENGTH}
    assert new.length in (known, known + 1)
    settle(bench)


def test_a_preempted_request_finds_what_it_computed_again() -> None:
    bench = Bench(block_size=4, blocks=12)
    old, new = bench.submit(prompt_of(15), 24), bench.submit(prompt_of(15, 1), 24)
    bench.until(lambda: bench.scheduler.preemptions == 1)
    bench.cancel(old)
    known = new.length
    (row,) = bench.step().rows
    assert row.request is new
    assert row.start >= known - 1 - 4  # the block taken from it when it was preempted is gone
    assert new.cached_tokens == 0, "a first admission's hits are reported, not those of a return"
    settle(bench)


def test_a_newcomer_is_admitted_when_there_is_room_for_its_whole_prompt() -> None:
    """And for a block of everyone that runs: it would be preempted in a moment, and compute in vain."""
    bench = Bench(block_size=4, blocks=20, max_batch_prefill_tokens=8)
    first = bench.submit(prompt_of(40), 12)
    bench.until(lambda: first.length > 40)
    bench.submit(prompt_of(40, 1), 4)
    bench.step()
    assert len(bench.scheduler.running) == 1
    settle(bench)
    assert bench.scheduler.preemptions == 0


# waiting_served_ratio and max_waiting_tokens mean what they mean in TGI.


def decoding(count: int, **limits: Any) -> Bench:
    bench = Bench(blocks=400, **limits)
    for start in range(count):
        bench.submit(prompt_of(6, start), 100)
    bench.step()
    assert len(bench.scheduler.running) == count
    return bench


def steps_until_running(bench: Bench, request: Request) -> int:
    return bench.until(lambda: bench.is_running(request), limit=99)


def test_without_a_ratio_newcomers_join_at_once() -> None:
    bench = decoding(6)
    assert steps_until_running(bench, bench.submit(prompt_of(6, 50))) == 1


@pytest.mark.parametrize(("ratio", "enough"), [(0.5, 3), (1.0, 6), (0.3, 1), (0.4, 2), (0.1, 1)])
def test_newcomers_wait_until_they_are_enough(ratio: float, enough: int) -> None:
    """As many as the whole part of ratio * running."""
    bench = decoding(6, waiting_served_ratio=ratio, max_waiting_tokens=1000)
    for start in range(enough):
        assert len(bench.scheduler.running) == 6
        last = bench.submit(prompt_of(6, 50 + start))
        bench.step()
    assert bench.is_running(last)


@pytest.mark.parametrize("most", [0, 1, 2, 20])
def test_newcomers_wait_no_longer_than_max_waiting_tokens(most: int) -> None:
    """Those that run get max_waiting_tokens tokens, the first of them included, then others join."""
    bench = decoding(6, waiting_served_ratio=1.2, max_waiting_tokens=most)
    request = bench.submit(prompt_of(6, 50))
    assert steps_until_running(bench, request) == max(1, most)


def test_steps_while_nobody_waited_count_too() -> None:
    bench = decoding(6, waiting_served_ratio=1.2, max_waiting_tokens=20)
    for _ in range(30):
        bench.step()
    assert steps_until_running(bench, bench.submit(prompt_of(6, 50))) == 1


def test_nobody_waits_when_nothing_decodes() -> None:
    bench = Bench(blocks=400, max_batch_prefill_tokens=8, waiting_served_ratio=1.2, max_waiting_tokens=20)
    bench.submit(prompt_of(20))
    bench.step()
    bench.submit(prompt_of(8, 1))
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 2
    settle(bench)
