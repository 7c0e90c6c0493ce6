import numpy as np
import pytest

from octavo.kv.pool import Blocks
from octavo.kv.radix import Match, Namespace, Node, PrefixTree, Tokens

ROOT = Namespace()


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


class Tree(PrefixTree):
    """A tree that remembers what it freed."""

    def __init__(self, block_size: int) -> None:
        self.freed: list[int] = []
        super().__init__(block_size, lambda blocks: self.freed.extend(blocks.tolist()))

    def add(self, text: Tokens, *blocks: int, namespace: Namespace = ROOT) -> Blocks:
        """Insert a whole text and let go of it."""
        root = self.lock(self.match(namespace, text[:0]))
        node, present = self.insert(root, text, np.array(blocks, np.int32))
        self.unlock(node)
        self.check()
        return present

    def touch(self, *values: int) -> Match:
        match = self.match(ROOT, tokens(*values))
        self.unlock(self.lock(match))
        self.check()
        return match


def test_a_match_ends_within_the_block_that_shares_most() -> None:
    tree = Tree(4)
    tree.add(tokens(1, 2, 3, 4, 5, 6, 7, 8), 10, 11)
    tree.add(tokens(1, 2, 3, 4, 5, 6, 9), 20, 12)
    tree.add(tokens(1, 2, 3, 4, 5, 300), 21, 13)
    assert tree.freed == [20, 21]
    ends = [((5, 6, 7, 0), 3, 11), ((5, 6, 9, 1), 3, 12), ((5, 300, 1), 2, 13), ((5, 6, 8), 2, None)]
    for end, copy_tokens, source in ends:
        match = tree.match(ROOT, tokens(1, 2, 3, 4, *end))
        assert (match.tokens, match.blocks.tolist(), match.copy_tokens) == (4 + copy_tokens, [10], copy_tokens)
        assert match.child is not None
        assert source in (None, match.child.blocks[match.inside // 4])
    assert tree.match(ROOT, tokens(1, 2, 3, 4, 6)).child is None
    assert tree.match(ROOT, tokens(2)).tokens == 0


def test_a_match_within_the_first_block_and_within_a_run() -> None:
    tree = Tree(4)
    tree.add(tokens(*range(12)), 1, 2, 3)
    for length in range(13):
        match = tree.match(ROOT, tokens(*range(length), 99))
        assert match.tokens == length
        assert match.blocks.tolist() == [1, 2, 3][: length // 4]


def test_only_the_source_block_is_locked() -> None:
    tree = Tree(2)
    tree.add(tokens(*range(8)), 1, 2, 3, 4)
    match = tree.match(ROOT, tokens(0, 1, 2, 9))
    node = tree.lock(match)
    source = tree.lock_source(match)
    tree.check()
    assert source.blocks.tolist() == [2]
    assert tree.evictable == 2
    tree.unlock(source)
    assert tree.evictable == 3
    tree.unlock(node)
    assert tree.evictable == 4


def test_a_full_block_takes_the_place_of_a_partly_filled_one() -> None:
    tree = Tree(4)
    tree.add(tokens(1, 2), 1)
    tree.add(tokens(1, 2, 3), 2)
    tree.add(tokens(1, 2), 3)
    assert tree.freed == [1, 3], "the shorter adds nothing, whichever comes first"
    tree.add(tokens(1, 2, 4), 4)
    tree.add(tokens(1, 2, 3, 4), 5)
    assert tree.freed == [1, 3, 2]
    assert tree.size == 2
    assert tree.match(ROOT, tokens(1, 2, 4)).tokens == 3


def test_a_partly_filled_block_that_is_copied_from_stays_until_then() -> None:
    tree = Tree(4)
    tree.add(tokens(1, 2), 1)
    match = tree.match(ROOT, tokens(1, 2, 9))
    node, source = tree.lock(match), tree.lock_source(match)
    tree.add(tokens(1, 2, 3, 4), 2)
    assert (tree.freed, tree.size) == ([], 2)
    tree.unlock(source)
    assert (tree.freed, tree.size) == ([1], 1)
    tree.unlock(node)
    tree.check()


def test_a_growing_answer_stays_few_nodes() -> None:
    tree = Tree(1)
    node = tree.lock(tree.match(ROOT, tokens()))
    for value in range(6000):
        node, _ = tree.insert(node, tokens(value), np.array([value + 1], np.int32))
    assert len(list(tree.nodes())) < 5
    match = tree.match(ROOT, np.arange(6000, dtype=np.int32))
    assert match.blocks.tolist() == list(range(1, 6001))
    tree.unlock(node)
    tree.check()


def test_a_run_in_use_by_two_does_not_grow_under_one() -> None:
    tree = Tree(1)
    tree.add(tokens(1), 1)
    first, second = (tree.lock(tree.match(ROOT, tokens(1))) for _ in range(2))
    longer, _ = tree.insert(first, tokens(2), np.array([2], np.int32))
    assert second.tokens.tolist() == [1]
    tree.unlock(longer)
    assert tree.evictable == 1
    tree.unlock(second)
    assert tree.evictable == 2


@pytest.mark.parametrize(
    "other",
    [Namespace(adapter="a"), Namespace(adapter_generation=1), Namespace(tenant="a"), Namespace(images=("a",))],
)
def test_namespaces_share_nothing_and_leave_nothing_behind(other: Namespace) -> None:
    tree = Tree(2)
    tree.add(tokens(1, 2, 3), 1, 2)
    assert tree.match(other, tokens(1, 2, 3)).tokens == 0
    tree.add(tokens(1, 2, 3), 3, 4, namespace=other)
    assert tree.match(other, tokens(1, 2, 3)).blocks.tolist() == [3]
    assert tree.match(ROOT, tokens(1, 2, 3)).blocks.tolist() == [1]
    tree.evict(4)
    assert list(tree.nodes()) == []


def test_fields_of_a_namespace_do_not_run_together() -> None:
    assert len({Namespace("ab", 0, "c"), Namespace("a", 0, "bc"), Namespace("", 0, "abc"), Namespace("abc")}) == 4


def test_a_cut_run_does_not_keep_the_memory_of_the_whole() -> None:
    tree = Tree(1)
    tree.add(np.arange(10000, dtype=np.int32), *range(1, 10001))
    for _ in range(9990):
        tree.evict(1)
    leaf = list(tree.nodes())[-1]
    for array in (leaf.tokens, leaf.blocks):
        assert array.size == 10
        assert array.base is None or array.base.size <= 20


def test_unlocking_too_often_is_an_error() -> None:
    tree = Tree(1)
    tree.add(tokens(1), 1)
    node: Node = tree.lock(tree.match(ROOT, tokens(1)))
    tree.unlock(node)
    with pytest.raises(RuntimeError, match="more often"):
        tree.unlock(node)
    with pytest.raises(ValueError, match="asked to evict 2 blocks, but 1 are evictable"):
        tree.evict(2)
    assert tree.size == 1


def test_tokens_of_another_width_are_the_same_tokens() -> None:
    tree = Tree(2)
    tree.add(tokens(1, 2, 3, 4), 1, 2)
    assert tree.match(ROOT, np.array([1, 2, 3, 4], np.int64)).tokens == 4
