"""Requests that begin alike: one computes, the others wait for it and share."""

import pytest

from octavo.kv.node import Namespace
from tests.engine.scheduling import Bench, prompt_of, settle


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
