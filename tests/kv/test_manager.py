import numpy as np
import pytest

from octavo.kv.manager import KVCacheManager
from octavo.kv.radix import Namespace, Tokens
from octavo.kv.table import BlockTable

ROOT = Namespace()


def text(*parts: range | int) -> Tokens:
    values = [value for part in parts for value in ([part] if isinstance(part, int) else part)]
    return np.array(values, np.int32)


def run(cache: KVCacheManager, prompt: Tokens, namespace: Namespace = ROOT) -> BlockTable:
    """Admit a request and compute its whole prompt."""
    table = cache.admit(prompt, namespace)
    assert cache.grow(table, prompt.size)
    cache.take_copies()
    table.computed = prompt.size
    cache.commit(table, prompt)
    cache.check()
    return table


def serve(cache: KVCacheManager, prompt: Tokens, namespace: Namespace = ROOT) -> int:
    """Run a request to its end; how many tokens of it were cached."""
    table = run(cache, prompt, namespace)
    cached = table.cached
    cache.release(table, prompt)
    cache.check()
    return cached


def test_requests_that_run_share_what_is_computed() -> None:
    cache = KVCacheManager(20, 4)
    first = run(cache, text(range(10)))
    second = cache.admit(text(range(10)), ROOT)
    assert second.computed == 8
    assert second.blocks.tolist() == first.blocks[:2].tolist()
    assert cache.stats().pinned == 2


def test_blocks_computed_twice_are_swapped_for_those_in_the_tree() -> None:
    cache = KVCacheManager(20, 4)
    prompt = text(range(8))
    tables = [cache.admit(prompt, ROOT) for _ in range(2)]
    for table in tables:
        assert cache.grow(table, 8)
        table.computed = 8
    assert tables[1].blocks.tolist() == [3, 4]
    for table in tables:
        cache.commit(table, prompt)
        cache.check()
    assert tables[1].blocks.tolist() == tables[0].blocks.tolist() == [1, 2]
    assert cache.stats().free == 17


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_one_token_is_computed_in_a_block_of_its_own(length: int) -> None:
    cache = KVCacheManager(20, 4)
    prompt = text(range(length))
    serve(cache, prompt)
    table = cache.admit(prompt, ROOT)
    assert cache.grow(table, length)
    assert table.computed == length - 1
    cached = {block for node in cache.tree.nodes() for block in node.blocks.tolist()}
    assert table.blocks[(length - 1) // 4] not in cached
    within = (length - 1) % 4
    assert cache.take_copies() == ([(-(-length // 4), int(table.blocks[-1]))] if within else [])


def test_the_source_of_a_copy_stays_until_the_copy_is_taken() -> None:
    cache = KVCacheManager(4, 4)
    serve(cache, text(1, 2, 3))
    table = cache.admit(text(1, 2, 9), ROOT)
    assert (table.computed, table.blocks.tolist()) == (2, [2])
    other = cache.admit(text(5), ROOT)
    assert not cache.grow(other, 8), "one block is free, the other is the source"
    assert cache.take_copies() == [(1, 2)]
    assert cache.take_copies() == []
    assert cache.grow(other, 8)
    cache.check()


def test_without_room_for_a_copy_the_full_blocks_count() -> None:
    cache = KVCacheManager(4, 4)
    serve(cache, text(range(11)))
    fits = cache.admit(text(range(7)), ROOT)
    assert fits.computed == 6
    cache.release(fits, text(range(7)))
    table = cache.admit(text(range(11)), ROOT)
    assert table.computed == 8, "its third block is the source, and would not be there for the prompt"
    assert cache.grow(table, 11)
    assert cache.take_copies() == []


def test_what_was_never_computed_is_never_found() -> None:
    cache = KVCacheManager(20, 4)
    prompt = text(range(12))
    table = cache.admit(prompt, ROOT)
    assert cache.grow(table, 12)
    table.computed = 5
    cache.release(table, prompt)
    assert cache.peek(prompt, ROOT) == 5
    failed = cache.admit(prompt, ROOT)
    assert cache.grow(failed, 12)
    cache.take_copies()
    failed.computed = 12
    cache.release(failed, prompt, insert=False)
    assert cache.peek(prompt, ROOT) == 5
    cancelled = cache.admit(text(range(4), 4, 77), ROOT)
    assert cancelled.computed == 5
    cache.release(cancelled, text(range(4), 4, 77))
    assert cache.take_copies() == []
    assert cache.peek(text(range(4), 4, 77), ROOT) == 5
    cache.check()


def test_a_request_that_cannot_grow_changes_nothing() -> None:
    cache = KVCacheManager(11, 1)
    serve(cache, text(range(4)))
    running = run(cache, text(range(50, 53)))
    before = cache.stats()
    newcomer = cache.admit(text(range(60, 68)), ROOT)
    assert not cache.can_fit(8)
    assert not cache.grow(newcomer, 8)
    assert cache.stats() == before
    assert cache.peek(text(range(5)), ROOT) == 4
    assert cache.can_fit(7)
    assert cache.grow(newcomer, 7)
    assert cache.stats().evictions == 4
    assert cache.grow(running, 3)
    cache.check()


def test_a_preempted_request_finds_what_it_had() -> None:
    cache = KVCacheManager(20, 4)
    prompt = text(range(10))
    table = run(cache, prompt)
    cache.release(table, prompt)
    again = cache.admit(text(range(10), 10), ROOT)
    assert again.computed == 10


def test_without_the_cache_nothing_is_read_or_fed() -> None:
    cache = KVCacheManager(20, 4)
    serve(cache, text(range(8)))
    table = cache.admit(text(range(9)), ROOT, use_cache=False)
    assert table.computed == 0
    assert cache.grow(table, 9)
    table.computed = 9
    cache.commit(table, text(range(9)))
    cache.release(table, text(range(9)))
    assert cache.peek(text(range(10)), ROOT) == 8
    assert cache.stats().cached == 2
    cache.check()


def test_prefix_caching_can_be_off() -> None:
    cache = KVCacheManager(20, 4, prefix_caching=False)
    assert [serve(cache, text(range(8))) for _ in range(2)] == [0, 0]
    assert (cache.stats().free, cache.stats().cached) == (19, 0)


def test_tenants_do_not_share() -> None:
    cache = KVCacheManager(40, 4)
    tenants = [Namespace(tenant=name) for name in "ab"]
    assert [serve(cache, text(range(9)), tenant) for tenant in [*tenants, *tenants]] == [0, 0, 8, 8]


def test_statistics_count_requests_that_computed() -> None:
    cache = KVCacheManager(20, 4)
    serve(cache, text(range(8)))
    waiting = cache.admit(text(range(9)), ROOT)
    cache.release(waiting, text(range(9)), insert=False)
    table = run(cache, text(range(9)))
    stats = cache.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (17, 8)
    assert (stats.total, stats.free, stats.cached, stats.held, stats.pinned) == (19, 16, 0, 3, 2)
    cache.release(table, text(range(9)))
    cache.reset()
    assert (cache.stats().free, cache.stats().evictions) == (19, 0)


def test_reset_keeps_what_is_in_use() -> None:
    cache = KVCacheManager(20, 4)
    serve(cache, text(range(20, 28)))
    table = run(cache, text(range(8)))
    cache.reset()
    assert (cache.stats().free, cache.stats().pinned) == (17, 2)
    assert cache.grow(table, 30)
    assert table.blocks.dtype == np.int32
    assert len(set(table.blocks.tolist())) == table.count == 8
    cache.check()


def test_misuse_is_an_error() -> None:
    cache = KVCacheManager(20, 4)
    with pytest.raises(ValueError, match="block_size is 0"):
        KVCacheManager(20, 0)
    with pytest.raises(ValueError, match="at least one token"):
        cache.admit(text(), ROOT)
    table = run(cache, text(1, 2, 3))
    with pytest.raises(ValueError, match="3 tokens are computed, of 2 and with 4 slots"):
        cache.release(table, text(1, 2))
    table.computed = 5
    with pytest.raises(ValueError, match="5 tokens are computed, of 9 and with 4 slots"):
        cache.commit(table, text(range(9)))
    table.computed = 3
    cache.check()
    cache.release(table, text(1, 2, 3))
    with pytest.raises(RuntimeError, match="released twice"):
        cache.release(table, text(1, 2, 3))
