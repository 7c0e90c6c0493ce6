"""What TGI's allocator is known to do, as facts about this cache.

TGI hands out blocks from the end of its free list; here ids ascend from 1. Where numbers differ for a better reason,
the test says why. Above all: TGI reports a fully cached prompt as cached to its last token, and its scheduler then
recomputes that token *into the shared block*. Here at least one token stays to be computed, in a block of the request's
own.
"""

import random

import numpy as np
import pytest

from octavo.kv.manager import KVCacheManager
from octavo.kv.pool import Blocks
from octavo.kv.radix import Match, Namespace, PrefixTree, Tokens
from octavo.kv.table import BlockTable

ROOT = Namespace()


def ids(values: list[int]) -> Tokens:
    return np.array(values, np.int32)


def allocate(cache: KVCacheManager, total: int, prompt: list[int]) -> BlockTable:
    """A request that has its whole prompt computed and room for `total` tokens."""
    table = cache.admit(ids(prompt), ROOT)
    assert cache.grow(table, total)
    cache.take_copies()
    table.computed = len(prompt)
    return table


def free(cache: KVCacheManager, table: BlockTable, prompt: list[int]) -> None:
    cache.release(table, ids(prompt))
    cache.check()


def slots(table: BlockTable, block_size: int, total: int) -> list[int]:
    return [block * block_size + offset for block in table.blocks.tolist() for offset in range(block_size)][:total]


def test_1_blocks_and_slots() -> None:
    cache, prompt = KVCacheManager(12, 2), [0, 1, 2, 3]
    table = allocate(cache, 8, prompt)
    assert table.blocks.tolist() == [1, 2, 3, 4]
    assert slots(table, 2, 8) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert table.cached == 0
    free(cache, table, prompt)
    table = allocate(cache, 8, prompt)
    # TGI: 4, in the same blocks. One token is left to compute, so the second block is a private copy.
    assert table.cached == 3
    assert table.blocks.tolist()[0] == 1
    assert 2 not in table.blocks


def test_2_a_prompt_that_ends_within_a_block() -> None:
    cache, prompt = KVCacheManager(12, 2), [0, 1, 2]
    table = allocate(cache, 7, prompt)
    assert slots(table, 2, 7) == [2, 3, 4, 5, 6, 7, 8]
    assert table.cached == 0
    free(cache, table, prompt)
    table = allocate(cache, 7, prompt)
    assert table.cached == 2
    free(cache, table, prompt)
    # TGI: 2. Partly filled blocks are cached here.
    assert allocate(cache, 7, [*prompt, 9]).cached == 3


def test_3_prefixes_are_reused() -> None:
    cache, prompt = KVCacheManager(12, 1), [0, 1, 2, 3]
    table = allocate(cache, 8, prompt)
    assert table.blocks.tolist() == slots(table, 1, 8) == list(range(1, 9))
    free(cache, table, prompt)
    table = allocate(cache, 8, prompt)
    assert table.cached == 3  # TGI: 4, see above
    assert table.blocks.tolist()[:3] == [1, 2, 3]


def test_4_older_prefixes_are_evicted_first() -> None:
    cache = KVCacheManager(7, 1)
    older = allocate(cache, 4, [0, 1, 2, 3])
    newer = allocate(cache, 2, [4, 5])
    assert (older.blocks.tolist(), newer.blocks.tolist()) == ([1, 2, 3, 4], [5, 6])
    free(cache, older, [0, 1, 2, 3])
    free(cache, newer, [4, 5])
    table = allocate(cache, 4, [6, 7, 8, 9])
    assert (table.blocks.tolist(), table.cached) == ([1, 2, 3, 4], 0)
    assert cache.peek(ids([4, 5, 0]), ROOT) == 2


def test_5_the_same_prompt_twice_at_once_is_kept_once() -> None:
    cache, prompt = KVCacheManager(10, 1), [0, 1, 2, 3]
    first, second = allocate(cache, 4, prompt), allocate(cache, 4, prompt)
    free(cache, second, prompt)
    free(cache, first, prompt)
    assert cache.stats().free == 5
    third = allocate(cache, 4, prompt)
    assert third.cached == 3  # TGI: 4, see above
    assert cache.available == 5


def test_6_prompts_that_overlap_in_part() -> None:
    cache = KVCacheManager(20, 1)
    left, right = [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7]
    first = allocate(cache, 4, [0, 1])
    assert first.cached == 0
    free(cache, first, [0, 1])
    second, third = allocate(cache, 8, left), allocate(cache, 8, right)
    assert (second.cached, third.cached) == (2, 2)
    assert second.blocks.tolist()[:2] == third.blocks.tolist()[:2] == first.storage.tolist()[:2]
    free(cache, third, right)
    free(cache, second, left)
    assert cache.stats().free == 11
    fourth, fifth = allocate(cache, 6, left), allocate(cache, 6, right)
    assert (fourth.cached, fifth.cached) == (5, 5)  # TGI: 6 and 6, see above
    assert fourth.blocks.tolist()[:4] == fifth.blocks.tolist()[:4]
    assert cache.available == 11


def test_6_better_prompts_that_run_at_once_share() -> None:
    # TGI inserts when a request ends. Here the second finds what the first has computed so far.
    cache, left, right = KVCacheManager(20, 1), [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7]
    second = allocate(cache, 8, left)
    cache.commit(second, ids(left))
    assert allocate(cache, 8, right).cached == 4


class Tree(PrefixTree):
    """A tree with TGI's three operations on it."""

    def __init__(self, block_size: int) -> None:
        self.freed: list[int] = []
        super().__init__(block_size, self.note)

    def note(self, blocks: Blocks) -> None:
        self.freed.extend(blocks.tolist())

    def add(self, tokens: list[int], blocks: list[int]) -> int:
        """Insert; how many tokens were there already."""
        root = self.lock(self.match(ROOT, ids([])))
        node, present = self.insert(root, ids(tokens), ids(blocks))
        self.unlock(node)
        self.check()
        return present.size * self.block_size

    def find(self, tokens: list[int]) -> list[int]:
        """The blocks of the longest prefix, which is now the most recently used."""
        match: Match = self.match(ROOT, ids(tokens))
        self.unlock(self.lock(match))
        self.check()
        return [int(block) for block in match.blocks]

    def evicted(self, count: int) -> list[int]:
        self.freed.clear()
        self.evict(count)
        self.check()
        return list(self.freed)


def test_7_insertions_at_block_size_1() -> None:
    tree = Tree(1)
    keys = [[0, 1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]]
    assert [tree.add(key, key) for key in keys] == [0, 3, 0, 3, 4]


def test_8_insertions_at_block_size_2() -> None:
    tree = Tree(2)
    keys = [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5, 6, 7, 8]]
    blocks = [[0, 1], [0, 1], [1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert [tree.add(*pair) for pair in zip(keys, blocks, strict=True)] == [0, 4, 0, 4, 2]


def test_9_find_gives_the_right_blocks() -> None:
    tree = Tree(1)
    for key in ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]):
        tree.add(key, key)
    for key in ([0], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]):
        assert tree.find(key) == key


def test_10_eviction_takes_the_right_blocks() -> None:
    tree = Tree(1)
    long = [0, 1, 2, 3, 5, 6, 7]
    for key in ([0, 1, 2], long, [0, 1, 2, 3, 4], [1, 2, 3]):
        tree.add(key, key)
    assert tree.evicted(1) == [7]
    assert tree.find(long) == [0, 1, 2, 3, 5, 6]
    tree.find([0, 1, 2, 3, 4])
    tree.find([1, 2, 3])
    assert tree.evicted(2) == [5, 6]
    assert tree.find(long) == [0, 1, 2, 3]
    tree.find([1, 2, 3])
    assert tree.evicted(3) == [4, 2, 3]  # TGI: 4, 3, 2; here 2 and 3 are one run by now, cut once
    assert tree.find([0, 1, 2, 3, 4]) == [0, 1]
    # TGI evicts what there is and gives 5 of 10. Here nothing is evicted in vain.
    with pytest.raises(ValueError, match="asked to evict 10 blocks, but 5"):
        tree.evict(10)
    assert tree.evicted(5) == [1, 2, 3, 0, 1]


def test_11_a_full_match_is_not_the_root() -> None:
    tree = Tree(1)
    tree.add([0, 1, 2], [0, 1, 2])
    match = tree.match(ROOT, ids([0, 1, 2]))
    assert match.node.tokens.tolist() == [0, 1, 2]


def test_12_a_partial_match_goes_no_further() -> None:
    tree = Tree(1)
    tree.add([0, 1, 2], [0, 1, 2])
    tree.add([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    match = tree.match(ROOT, ids([0, 1, 3, 4, 5]))
    assert match.blocks.tolist() == [0, 1]
    assert tree.lock(match) is tree.lock(tree.match(ROOT, ids([0, 1])))
    assert tree.evictable == 4  # TGI pins the whole node that matched in part: 0 here


@pytest.mark.parametrize("part", [1.0, 0.2])
def test_13_and_14_many_operations(part: float) -> None:
    choose = random.Random(64)
    data = [choose.randrange(2) for _ in range(1000)]
    cache, live = KVCacheManager(100, 1), list[tuple[BlockTable, list[int]]]()
    for _ in range(200):
        while True:
            start = choose.randrange(1000)
            prompt = data[start : start + choose.randrange(8)] or [0]  # an empty prompt is refused at the door here
            table = cache.admit(ids(prompt), ROOT)
            live.append((table, prompt))
            if not cache.grow(table, len(prompt) + choose.randrange(8)):
                break
            table.computed = len(prompt)
        cache.check()
        choose.shuffle(live)
        for _ in range(round(part * len(live))):
            free(cache, *live.pop())
    for table, prompt in live:
        free(cache, table, prompt)
    cache.reset()
    assert cache.stats().free == 99


def test_a_request_that_fails_costs_no_cached_prefix() -> None:
    # TGI: the cache is empty afterwards, it evicts first and looks then.
    cache = KVCacheManager(11, 1)
    free(cache, allocate(cache, 4, [0, 1, 2, 3]), [0, 1, 2, 3])
    table = cache.admit(ids([9] * 11), ROOT)
    assert not cache.grow(table, 11)
    assert cache.peek(ids([0, 1, 2, 3, 4]), ROOT) == 4


def test_what_was_never_computed_is_not_found() -> None:
    # TGI: a full hit on garbage, since dropping an allocation inserts its prompt.
    cache = KVCacheManager(12, 2)
    table = cache.admit(ids([0, 1, 2, 3]), ROOT)
    assert cache.grow(table, 8)
    free(cache, table, [0, 1, 2, 3])
    assert cache.peek(ids([0, 1, 2, 3, 4]), ROOT) == 0
    assert cache.stats().free == 11


def test_the_answer_is_cached_too() -> None:
    # TGI: 20 of 33, the prompt of the first turn alone.
    cache = KVCacheManager(60, 1)
    first, answer = list(range(20)), list(range(100, 108))
    table = allocate(cache, 28, first)
    table.computed = 27  # the last token of an answer is sampled, never computed
    free(cache, table, first + answer)
    assert allocate(cache, 33, [*first, *answer, *range(200, 205)]).cached == 27
