"""The prefix tree: which blocks hold keys and values of which tokens, for reuse by later requests.

RadixAttention (arXiv 2312.07104, section 3) in units of blocks. Three things are worth knowing:

- A run of tokens is one node, so a lookup compares arrays and touches one node per branching point, not per block.
- A lock counts on every node up to the root. What is not locked can be evicted, and nothing below it is locked.
- Unlocked nodes stand in one queue in order of their last use, children before their parents. So its head is always
  a leaf and always the least recently used.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

import numpy as np

from octavo.kv.node import NO_TOKENS, Namespace, Node, Tokens, common_prefix, key_of, own
from octavo.kv.pool import NO_BLOCKS, Blocks

__all__ = ["Match", "Namespace", "Node", "PrefixTree", "Tokens"]

_GROWING = 4096  # tokens up to which a leaf grows in place (a copy of a few microseconds) before it gets a child


class Match(NamedTuple):
    """The longest cached prefix of some tokens. Holds until the tree changes."""

    tokens: int
    """Length of the prefix, the part within a block included."""
    blocks: Blocks
    """Its full blocks, int32 [full]."""
    node: Node
    """The deepest node that matched from end to end."""
    child: Node | None
    """The child of it in which the match ends, if any."""
    inside: int
    """Tokens of `child` in full blocks that match."""
    copy_tokens: int
    """Tokens that match in the block of `child` behind those."""


class PrefixTree:
    """Cached blocks by namespace and tokens. Whatever the tree lets go of is handed to `free`."""

    def __init__(self, block_size: int, free: Callable[[Blocks], None]) -> None:
        self.block_size = block_size
        self.size = 0
        """Blocks in the tree."""
        self.evictable = 0
        """Those of them that nobody locks."""
        self._free = free
        self._roots: dict[Namespace, Node] = {}
        self._unlocked: OrderedDict[Node, None] = OrderedDict()

    def match(self, namespace: Namespace, tokens: Tokens) -> Match:
        """Find the longest cached prefix of `tokens`, int32 [tokens]. Changes nothing."""
        node = self._roots.get(namespace) or Node(namespace, NO_TOKENS, NO_BLOCKS)
        runs: list[Blocks] = []
        start = 0
        while child := self._child(node, tokens[start:]):
            common = common_prefix(child.tokens, tokens[start:])
            inside = common - common % self.block_size
            if inside < child.tokens.size:
                runs.append(child.blocks[: inside // self.block_size])
                return Match(start + common, _concatenate(runs), node, child, inside, common - inside)
            runs.append(child.blocks)
            start += common
            node = child
        # A block of one token has no part that could match when the whole does not.
        child, common = node.closest(tokens[start : start + self.block_size]) if self.block_size > 1 else (None, 0)
        return Match(start + common, _concatenate(runs), node, child, 0, common)

    def lock(self, match: Match) -> Node:
        """Lock the full blocks of a fresh match against eviction; give the node in which they end, for `unlock`."""
        node = match.node
        if match.child is not None and match.inside:
            node = self._split(match.child, match.inside)
        elif node.parent is None:
            node = self._roots.setdefault(node.namespace, node)
        self._lock(node)
        return node

    def lock_source(self, match: Match) -> Node:
        """Lock, after `lock`, the one block within which the match ends; give its node, for `unlock`."""
        node = match.child
        assert node is not None
        if node.blocks.size > 1:  # what lies behind the block stays evictable
            node = self._split(node, self.block_size)
        self._lock(node)
        return node

    def unlock(self, node: Node) -> None:
        """Undo one lock; what nobody else locks is now the most recently used. Raises RuntimeError if none is held."""
        if node.locks < 1:
            raise RuntimeError("a tree node was unlocked more often than it was locked")
        above: Node | None = node
        while above is not None:
            above.locks -= 1
            if not above.locks:
                self._unlocked_one(above)
            above = above.parent
        if not node.locks and node.tokens.size < self.block_size:
            self._drop_redundant(node)

    def insert(self, node: Node, tokens: Tokens, blocks: Blocks) -> tuple[Node, Blocks]:
        """Put a run of tokens behind `node`, which the caller has locked and which ends with a full block.

        Gives the node in which the run ends, to which the caller's lock has moved, and the blocks that were there
        already, in place of the caller's first ones. Those of the caller are freed, and so is a partly filled last
        block that adds nothing; all others belong to the tree from now on.
        """
        runs: list[Blocks] = []
        start = 0
        while child := self._child(node, tokens[start:]):
            common = common_prefix(child.tokens, tokens[start:])
            common -= common % self.block_size
            node = self._split(child, common) if common < child.tokens.size else child
            self._lock_one(node)
            runs.append(node.blocks)
            start += common
        present = _concatenate(runs)
        self._free(blocks[: present.size])
        if start < tokens.size:
            node = self._append(node, tokens[start:], blocks[present.size :])
        return node, present

    def evict(self, count: int) -> None:
        """Free `count` blocks, least recently used leaves first, from their ends. Raises ValueError if fewer can be."""
        if count > self.evictable:
            raise ValueError(f"asked to evict {count} blocks, but {self.evictable} are evictable")
        spare: list[Blocks] = []
        while count > 0:
            leaf = next(iter(self._unlocked))
            spare.append(self._cut(leaf, count) if count < leaf.blocks.size else self._remove(leaf))
            count -= spare[-1].size
        self._free(_concatenate(spare))

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first, roots included."""
        waiting = list(self._roots.values())
        while waiting:
            yield (node := waiting.pop())
            waiting.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError unless the tree is sound by itself; costs its whole size."""
        place = {node: index for index, node in enumerate(self._unlocked)}
        nodes = list(self.nodes())
        inner = [node for node in nodes if node.parent is not None]
        assert self.size == sum(node.blocks.size for node in inner), "size"
        assert self.evictable == sum(node.blocks.size for node in place), "evictable"
        assert set(place) == {node for node in inner if not node.locks}, "the queue holds the unlocked nodes"
        assert all(root.locks or root.children for root in self._roots.values()), "each root is of use"
        for node in inner:
            assert node.key == key_of(node.tokens[: self.block_size]), "key"
            assert node.blocks.size == -(-node.tokens.size // self.block_size) > 0, "blocks hold the tokens"
        for node in nodes:
            assert node.order == sorted(node.children), "order"
            assert not (node.children and node.tokens.size % self.block_size), "only a leaf is partly filled"
            for key, child in node.children.items():
                assert (child.parent, child.key, child.namespace) == (node, key, node.namespace), "child"
                assert child.locks or not node.has_longer(key), "a block that adds nothing is kept only while locked"
                assert child.locks <= node.locks, "locks count up to the root"
                assert node not in place or place[child] < place[node], "children come before their parents"

    def _child(self, node: Node, tokens: Tokens) -> Node | None:
        """The child whose first block is the first block of `tokens`."""
        if tokens.size < self.block_size or not node.children:
            return None
        return node.children.get(key_of(tokens[: self.block_size]))

    def _append(self, node: Node, tokens: Tokens, blocks: Blocks) -> Node:
        """Put a run behind `node` whose first block is not there; the lock on `node` extends to it."""
        key = key_of(tokens[: self.block_size])
        if key in node.children:  # a partly filled block with the same tokens
            self._free(blocks)
            return node
        shorter = node.shorter(key)
        if shorter is not None and not shorter.locks:  # a locked one goes when it is unlocked
            self._free(self._remove(shorter))
        self.size += blocks.size
        if node.parent is not None and not node.children and node.locks == 1 and node.tokens.size <= _GROWING:
            node.tokens = np.concatenate((node.tokens, tokens), dtype=np.int32)
            node.blocks = np.concatenate((node.blocks, blocks))
            return node
        child = Node(node.namespace, tokens.astype(np.int32), blocks.copy(), node, key, locks=1)
        node.link(child)
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two at a block boundary; give the upper part, which the caller must lock.

        The lower part stays the same object, since locks are held on the end of a node.
        """
        parent, cut = node.parent, at // self.block_size
        assert parent is not None
        upper = Node(node.namespace, own(node.tokens[:at]), own(node.blocks[:cut]), parent, node.key, node.locks)
        parent.children[node.key] = upper
        node.tokens, node.blocks = own(node.tokens[at:]), own(node.blocks[cut:])
        node.parent, node.key = upper, key_of(node.tokens[: self.block_size])
        upper.link(node)
        return upper

    def _cut(self, leaf: Node, count: int) -> Blocks:
        """Cut `count` blocks off the end of an unlocked leaf, which has more; give them."""
        kept = leaf.blocks.size - count
        spare = leaf.blocks[kept:]
        leaf.tokens, leaf.blocks = own(leaf.tokens[: kept * self.block_size]), own(leaf.blocks[:kept])
        self.size -= count
        self.evictable -= count
        return spare

    def _remove(self, leaf: Node) -> Blocks:
        """Take an unlocked leaf out; give its blocks."""
        parent = leaf.parent
        assert parent is not None
        parent.unlink(leaf)
        del self._unlocked[leaf]
        self.size -= leaf.blocks.size
        self.evictable -= leaf.blocks.size
        if parent.parent is None and not parent.locks:
            self._drop_root(parent)
        return leaf.blocks

    def _drop_root(self, root: Node) -> None:
        if not root.children:  # tenants and images are without number, an empty root must not stay
            del self._roots[root.namespace]

    def _drop_redundant(self, leaf: Node) -> None:
        """Remove a partly filled block that adds nothing to a sibling, who may have come while it was copied from."""
        if leaf.parent is not None and leaf.parent.has_longer(leaf.key):
            self._free(self._remove(leaf))

    def _lock(self, node: Node | None) -> None:
        while node is not None:
            self._lock_one(node)
            node = node.parent

    def _lock_one(self, node: Node) -> None:
        if not node.locks:
            self._unlocked.pop(node, None)  # the upper part of a split is not in the queue yet
            self.evictable -= node.blocks.size
        node.locks += 1

    def _unlocked_one(self, node: Node) -> None:
        if node.parent is None:
            self._drop_root(node)
        else:
            self._unlocked[node] = None
            self.evictable += node.blocks.size
            node.used = monotonic()


def _concatenate(runs: list[Blocks]) -> Blocks:
    if len(runs) < 2:
        return runs[0] if runs else NO_BLOCKS
    return np.concatenate(runs)
