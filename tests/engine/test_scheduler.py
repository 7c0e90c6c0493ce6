"""The scheduler over the real cache, on a device that remembers what each slot was given.

OCTAVO_SCHEDULER_EXAMPLES sets how many stories hypothesis tells.
"""

import os
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.request import FinishReason, Request
from octavo.engine.scheduler import RequestRefused
from octavo.kv.node import Namespace
from tests.engine.scheduling import VOCABULARY, Bench
from tests.engine.slot_memory import continuation

EXAMPLES = int(os.environ.get("OCTAVO_SCHEDULER_EXAMPLES", "60"))


def prompt_of(length: int, start: int = 0) -> list[int]:
    """A prompt that begins like no other with another start."""
    return [start % VOCABULARY, *[(7 * start + index) % VOCABULARY for index in range(1, length)]]


def settle(bench: Bench) -> None:
    """Let all requests end, and see that each block is free or cached."""
    bench.drain()
    stats = bench.kv.stats()
    assert stats.free + stats.cached == stats.total
    bench.kv.reset()
    assert bench.kv.stats().free == stats.total


class Operations(RuleBasedStateMachine):
    """Anything at any time: few tokens make prefixes collide, few blocks make requests preempt each other."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        blocks=st.integers(6, 24),
        chunk=st.sampled_from([1, 2, 5, 1000]),
        most=st.sampled_from([None, 1, 3]),
        spare=st.sampled_from([0, 0, 1, 2]),
        caching=st.sampled_from(["prefixes", "prefixes", "none", "none, nor chunks"]),
        patience=st.sampled_from([(None, None), (0.5, 3), (1.5, 20), (1.2, None)]),
    )
    def start(
        self, block_size: int, blocks: int, chunk: int, most: int | None, spare: int, caching: str,
        patience: tuple[float | None, int | None],
    ) -> None:  # fmt: skip
        ratio, waiting = patience
        whole = caching == "none, nor chunks"
        self.bench = Bench(
            block_size=block_size, blocks=blocks, prefix_caching=caching == "prefixes", whole_prompts=whole,
            max_batch_prefill_tokens=blocks * block_size if whole else chunk, max_batch_size=most, spare_slots=spare,
            waiting_served_ratio=ratio, max_waiting_tokens=waiting,
        )  # fmt: skip
        self.capacity = blocks * block_size - spare

    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=9), tenant=st.booleans())
    def submit(self, data: st.DataObject, new: list[int], tenant: bool) -> None:
        """Continue what another request is at, or start afresh."""
        others = [[], *(request.known.tolist() for request in self.bench.requests[-4:])]
        prompt = (data.draw(st.sampled_from(others)) + new)[-self.capacity + 1 :]
        if len(prompt) >= self.capacity:
            return
        max_tokens = data.draw(st.integers(1, min(8, self.capacity - len(prompt))))
        ends = frozenset(data.draw(st.lists(st.integers(0, VOCABULARY), max_size=20)))
        # Log-probabilities of the prompt keep a request out of the cache.
        wanted = data.draw(st.sampled_from([None, None, None, 0]))
        namespace = Namespace(tenant="a" if tenant else "")
        self.bench.submit(prompt, max_tokens, end_ids=ends, namespace=namespace, prompt_logprobs=wanted)

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule()
    def fail(self) -> None:
        self.bench.step(fail=True)

    @precondition(lambda self: self.bench.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel(data.draw(st.sampled_from(self.bench.open)))

    @invariant()
    def the_cache_is_sound(self) -> None:
        self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            settle(self.bench)


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 90), (4, 24), (16, 7), (64, 3)])
def test_random_walks(block_size: int, blocks: int) -> None:
    """Longer stories than hypothesis tells: all answers are right, and the walks went where they should."""
    benches = [random_walk(block_size, blocks, random.Random(seed * 1009 + block_size)) for seed in range(8)]
    assert sum(bench.scheduler.preemptions for bench in benches) > 2
    assert sum(bench.kv.stats().hit_tokens for bench in benches) > 400
    assert sum(bench.kv.stats().evictions for bench in benches) > 4
    assert sum(bench.memory.copies for bench in benches) > 4 or block_size == 1


def random_walk(block_size: int, blocks: int, chance: random.Random) -> Bench:
    bench = Bench(block_size=block_size, blocks=blocks, max_batch_prefill_tokens=chance.choice([3, 16, 1000]))
    texts = [prompt_of(20)]
    longest = block_size * blocks * 2 // 3
    for _ in range(300):
        action = chance.random()
        if action < 0.3 and len(bench.open) < 8:
            old = chance.choice(texts)
            prompt = old[: chance.randint(0, len(old))] + chance.choices(range(VOCABULARY), k=chance.randint(1, 12))
            prompt = prompt[: longest // 2]
            ends = frozenset([chance.randrange(2 * VOCABULARY)])
            request = bench.submit(prompt, chance.randint(1, longest - len(prompt)), end_ids=ends)
            texts = [*texts[-8:], request.known.tolist()]
        elif action < 0.33 and bench.open:
            bench.cancel(chance.choice(bench.open))
        else:
            bench.step(fail=action > 0.995)
    settle(bench)
    return bench


# What is refused, and with which numbers


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


# Who runs


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


@pytest.mark.parametrize("blocks", [9, 200])
def test_whole_prompts_are_computed_in_one_step_or_not_yet(blocks: int) -> None:
    """A prompt that comes back from preemption too, with what it had generated."""
    bench = Bench(blocks=blocks, prefix_caching=False, max_batch_prefill_tokens=32, whole_prompts=True)
    requests = [bench.submit(prompt_of(length, length), 10) for length in (20, 12, 1, 22)]
    while bench.open:
        for row in bench.step().rows:
            assert row.samples
    assert [len(request.generated) for request in requests] == [10] * 4
    assert (bench.scheduler.preemptions > 0) == (blocks == 9)


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


# waiting_served_ratio and max_waiting_tokens: TGI's batching task


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


# Requests that begin alike


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1000, 32, 7])
def test_of_equal_prompts_one_computes_and_the_others_share(block_size: int, chunk: int) -> None:
    bench = Bench(block_size=block_size, blocks=4096 // block_size, max_batch_prefill_tokens=chunk)
    requests = [bench.submit(prompt_of(100), 30) for _ in range(8)]
    steps = bench.until(lambda: len(bench.scheduler.running) == 8)
    assert steps <= -(-100 // chunk) + 1 + 8 * block_size // chunk
    settle(bench)
    assert bench.computed[0] == 100
    for request in requests[1:]:
        assert 1 <= bench.computed[request.id] <= block_size
        assert request.cached_tokens == 100 - bench.computed[request.id]


def test_the_others_wait_for_shared_blocks_alone() -> None:
    """A leader's own end is nothing to wait for."""
    bench = Bench(block_size=4, blocks=200, max_batch_prefill_tokens=10)
    bench.submit(prompt_of(20) + prompt_of(60, 1))
    follower = bench.submit(prompt_of(20) + prompt_of(4, 2))
    bench.step()
    assert not bench.is_running(follower)
    bench.step()
    assert not bench.is_running(follower)
    bench.step()
    assert follower.cached_tokens is None, "the leader's chunk took the whole budget"
    settle(bench)
    assert follower.cached_tokens == 20


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_shared_prefix_shorter_than_a_block_is_no_reason_to_wait(prefix_caching: bool) -> None:
    bench = Bench(block_size=16, blocks=40, prefix_caching=prefix_caching)
    shared = 15 if prefix_caching else 40
    for start in (1, 2):
        bench.submit(prompt_of(shared) + prompt_of(20, start))
    assert len(bench.step().rows) == 2
    settle(bench)


def test_nobody_waits_for_one_of_another_namespace_or_one_that_stays_out_of_the_cache() -> None:
    bench = Bench(blocks=200)
    bench.submit(prompt_of(40), prompt_logprobs=0)
    bench.submit(prompt_of(40), namespace=Namespace(tenant="a"))
    bench.submit(prompt_of(40))
    bench.submit(prompt_of(40), prompt_logprobs=0)
    bench.submit(prompt_of(40))
    assert [row.request.id for row in bench.step().rows] == [0, 1, 2, 3]
    settle(bench)
    assert [request.cached_tokens for request in bench.requests] == [0, 0, 0, 0, 39]


@pytest.mark.parametrize("fail", [False, True])
def test_the_next_computes_when_the_leader_ends_early(fail: bool) -> None:
    bench = Bench(block_size=4, blocks=200, max_batch_prefill_tokens=10)
    leader, second, third = (bench.submit(prompt_of(60)) for _ in range(3))
    bench.step()
    if fail:
        bench.step(fail=True)
    else:
        bench.cancel(leader)
    assert [row.request for row in bench.step().rows] == [second]
    assert second.cached_tokens == (8 if fail else 10)
    assert not bench.is_running(third)
    settle(bench)
    assert third.cached_tokens is not None
    assert third.cached_tokens >= 56


def test_a_step_that_failed_leaves_nothing_of_itself_to_others() -> None:
    bench = Bench(block_size=4, blocks=20)
    bench.submit(prompt_of(20))
    bench.step(fail=True)
    again = bench.submit(prompt_of(20))
    settle(bench)
    assert again.cached_tokens == 0


# Ends


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("blocks", [10, 200])
def test_cancelling_frees_everything_at_any_point(steps: int, blocks: int) -> None:
    """Waiting, in the middle of a prompt, decoding, preempted: the others' answers stay right."""
    bench = Bench(block_size=4, blocks=blocks, max_batch_prefill_tokens=9)
    requests = [bench.submit(prompt_of(12) + prompt_of(12, start), 12) for start in range(3)]
    for _ in range(steps):
        bench.step()
    victim = requests[steps % 3]
    if victim.id not in bench.ended:
        bench.cancel(victim)
    bench.scheduler.cancel(victim)  # once more is no error
    settle(bench)
    assert all(len(request.generated) == 12 for request in requests if request is not victim)


def test_all_cancelled_all_free() -> None:
    bench = Bench(block_size=4, blocks=20, max_batch_prefill_tokens=16)
    for start in range(6):
        bench.submit(prompt_of(30, start), 10)
    for _ in range(5):
        bench.step()
    for request in bench.open:
        bench.cancel(request)
    assert bench.kv.stats().held == 0
    settle(bench)


def test_a_sequence_ends_with_its_end_token_unless_it_is_too_short() -> None:
    answer = continuation(prompt_of(10), 12, VOCABULARY)
    ends = frozenset([answer[3], answer[9]])
    for min_tokens, length in ((0, 4), (3, 4), (4, 10), (10, 12), (12, 12)):
        bench = Bench()
        request = bench.submit(prompt_of(10), 12, end_ids=ends, min_tokens=min_tokens)
        settle(bench)
        assert request.generated.tolist() == answer[:length]
        assert bench.ended[request.id] is (FinishReason.LENGTH if length == 12 else FinishReason.EOS)


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_spare_slots_are_held_beyond_a_requests_tokens(spare: int) -> None:
    bench = Bench(block_size=4, blocks=20, spare_slots=spare)
    request = bench.submit(prompt_of(8), 30)
    for _ in range(20):
        bench.step()
        assert request.table is not None
        assert request.table.count == -(-(request.computed + spare) // 4)
    settle(bench)


def test_a_prefix_that_would_have_to_be_copied_does_not_keep_out_a_request_that_needs_the_whole_cache() -> None:
    """The original and its copy together would leave no room for the spare slot."""
    bench = Bench(block_size=2, blocks=9, spare_slots=1)
    bench.submit(prompt_of(15), 2)
    settle_running(bench)
    last = bench.submit([*prompt_of(15), 50], 1)
    settle(bench)
    assert last.cached_tokens == 14


def settle_running(bench: Bench) -> None:
    """Let all requests end; what they computed stays cached."""
    bench.drain()
    assert bench.kv.stats().held == 0
