"""The scheduler over the real cache, on a device that remembers what each slot was given: it does what it should.

OCTAVO_SCHEDULER_EXAMPLES sets how many stories hypothesis tells.
"""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.request import FinishReason
from octavo.kv.node import Namespace
from tests.engine.scheduling import VOCABULARY, Bench, prompt_of, settle
from tests.engine.slot_memory import continuation

EXAMPLES = int(os.environ.get("OCTAVO_SCHEDULER_EXAMPLES", "60"))


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
        counts_decodes=st.booleans(),
    )
    def start(
        self, block_size: int, blocks: int, chunk: int, most: int | None, spare: int, caching: str,
        patience: tuple[float | None, int | None], counts_decodes: bool,
    ) -> None:  # fmt: skip
        ratio, waiting = patience
        whole = caching == "none, nor chunks"
        chunk = blocks * block_size if whole else chunk
        self.bench = Bench(
            block_size=block_size, blocks=blocks, prefix_caching=caching == "prefixes", whole_prompts=whole,
            max_batch_prefill_tokens=chunk, max_batch_size=min(most or chunk, chunk) if counts_decodes else most,
            counts_decodes=counts_decodes, spare_slots=spare, waiting_served_ratio=ratio, max_waiting_tokens=waiting,
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
            request = bench.submit(prompt, chance.randint(longest // 4, longest - len(prompt)), end_ids=ends)
            texts = [*texts[-8:], request.known.tolist()]
        elif action < 0.33 and bench.open:
            bench.cancel(chance.choice(bench.open))
        else:
            bench.step(fail=action > 0.995)
    settle(bench)
    return bench


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
    bench.drain()
    last = bench.submit([*prompt_of(15), 50], 1)
    settle(bench)
    assert last.cached_tokens == 14
