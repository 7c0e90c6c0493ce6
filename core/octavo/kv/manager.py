"""The block cache as the scheduler sees it: admit, grow, commit, release."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from octavo.kv.budget import blocks_for_tokens
from octavo.kv.pool import BlockPool
from octavo.kv.radix import Match, Namespace, Node, PrefixTree, Tokens
from octavo.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks now (free + cached + held = total) and counters since the start."""

    total: int
    """Usable blocks, block 0 not among them."""
    free: int
    cached: int
    """Blocks of cached prefixes that nobody uses: they can be evicted."""
    held: int
    """Blocks in use by requests, shared ones counted once."""
    pinned: int
    """Those of `held` that the prefix tree owns."""
    evictions: int
    """Blocks evicted so far to make room."""
    hit_tokens: int
    """Prompt tokens found in the cache, of requests that went on to compute."""
    queried_tokens: int
    """Prompt tokens looked up by those requests."""


class KVCacheManager:
    """Gives blocks to requests, keeps what they computed for the next ones, and evicts that when blocks run short.

    One step of the scheduler: `admit` newcomers, `grow` whatever runs, launch the step, `take_copies`, advance each
    `table.computed`, `commit`. At a request's end, cancellation or preemption: `release`.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        """`num_blocks` includes block 0, `block_size` is in tokens. Raises ValueError if either is too small."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size, self.pool.release)
        self._tables: set[BlockTable] = set()
        self._copies: list[BlockTable] = []
        self._evictions = self._hit_tokens = self._queried_tokens = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now: the free and the evictable ones."""
        return self.pool.free_count + self.tree.evictable

    def admit(
        self, tokens: Tokens, namespace: Namespace, use_cache: bool = True, spare_slots: int = 0, reserved: int = 0
    ) -> BlockTable:
        """Start a request on its tokens, int32 [tokens]: lock its cached prefix, which `table.computed` tells.

        At least one token is left to compute, and the block that it writes to is the request's own: a prefix that ends
        within a block is continued in a private copy of that block, if the whole prompt and `spare_slots` more fit
        beside the original and `reserved` blocks of others. No other block is taken yet. A request with
        use_cache=False neither reads nor feeds the cache. Raises ValueError for an empty prompt.
        """
        if not tokens.size:
            raise ValueError("a request needs at least one token")
        table = BlockTable(namespace, storage=np.empty(blocks_for_tokens(tokens.size, self.block_size), np.int32))
        self._tables.add(table)
        if self.prefix_caching and use_cache:
            match = self.tree.match(namespace, tokens[:-1])
            table.node = self.tree.lock(match)
            table.append(match.blocks)
            table.shared = table.count
            table.computed = table.count * self.block_size
            if match.copy_tokens:
                self._copy_on_write(table, match, tokens.size + spare_slots, reserved)
            table.cached, table.queried = table.computed, tokens.size
        return table

    def peek(self, tokens: Tokens, namespace: Namespace) -> int:
        """Cached tokens that `admit` would find if blocks are not short. No side effects."""
        return self.tree.match(namespace, tokens[:-1]).tokens

    def can_fit(self, tokens: int) -> bool:
        """Could a newcomer of that many tokens be given all its blocks now?"""
        return blocks_for_tokens(tokens, self.block_size) <= self.available

    def grow(self, table: BlockTable, total_tokens: int) -> bool:
        """Make the table hold total_tokens; evicts if it must. False, and nothing is changed, if that is impossible."""
        needed = blocks_for_tokens(total_tokens, self.block_size) - table.count
        if needed <= 0:
            return True
        if needed > self.available:
            return False
        self._take(table, needed)
        return True

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy on the device before the next step writes anything, as (source, destination)."""
        return [(int(_source(table).blocks[0]), int(table.blocks[table.shared])) for table in self._copies]

    def take_copies(self) -> list[tuple[int, int]]:
        """The same, which are made now, or will be before anything else is: call it for each step that is launched."""
        copies = self.copies
        for table in self._copies:
            self.tree.unlock(_source(table))
            table.source = None
        self._copies.clear()
        return copies

    def commit(self, table: BlockTable, tokens: Tokens) -> None:
        """Share the blocks that are now full; tokens, int32 [at least table.computed], are the request's.

        A block that somebody else shared meanwhile takes the place of the request's own in `table.blocks`. Raises
        ValueError if more is computed than there are tokens or slots for.
        """
        self._count(table)
        full = table.computed // self.block_size
        if table.node is None or full == table.shared:
            return
        assert table.source is None, "the request computed before its copy was taken"
        self._check_computed(table, tokens)
        run = tokens[table.shared * self.block_size : full * self.block_size]
        own = table.blocks[table.shared : full]
        table.node, present = self.tree.insert(table.node, run, own)
        own[: present.size] = present
        table.shared = full

    def release(self, table: BlockTable, tokens: Tokens, insert: bool = True) -> None:
        """End a request: keep what it computed as a cached prefix, the last partly filled block too, and free the rest.

        tokens, int32 [at least table.computed], are the request's. insert=False, for a step that failed, keeps only
        what was committed. Raises RuntimeError for a table that is not in use, ValueError as `commit` does.
        """
        if table not in self._tables:
            raise RuntimeError("a block table was released twice, or is not of this cache")
        if insert:
            self._check_computed(table, tokens)
        self._tables.remove(table)
        self._count(table)
        self._drop_copy(table)
        kept = table.shared
        if table.node is not None:
            if insert:
                kept = blocks_for_tokens(table.computed, self.block_size)
                run = tokens[table.shared * self.block_size : table.computed]
                table.node, _ = self.tree.insert(table.node, run, table.blocks[table.shared : kept])
            self.tree.unlock(table.node)
        self.pool.release(table.blocks[kept:])
        table.node, table.count, table.shared, table.computed = None, 0, 0, 0

    def reset(self) -> None:
        """Forget every cached prefix that is not in use."""
        self.tree.evict(self.tree.evictable)

    def stats(self) -> CacheStats:
        """The numbers as they stand; costs nothing."""
        total, free, cached = self.pool.num_blocks - 1, self.pool.free_count, self.tree.evictable
        return CacheStats(
            total=total,
            free=free,
            cached=cached,
            held=total - free - cached,
            pinned=self.tree.size - cached,
            evictions=self._evictions,
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError unless each block is in one place and each lock has a holder; costs the whole cache."""
        self.pool.check()
        self.tree.check()
        nodes = list(self.tree.nodes())
        locks: Counter[Node] = Counter()
        for table in self._tables:
            path = _path(table.node)
            locks.update(path)
            locks.update(_path(table.source))
            assert (table.source is not None) == (table in self._copies), "a source waits for its copy"
            shared = [block for node in reversed(path) for block in node.blocks.tolist()]
            assert shared == table.blocks[: table.shared].tolist(), "shared blocks are the path's"
        assert all(locks[node] == node.locks for node in nodes), "each lock has its holder"
        places = [self.pool.free_blocks(), *(node.blocks for node in nodes)]
        places.extend(table.blocks[table.shared :] for table in self._tables)
        everywhere = np.sort(np.concatenate(places))
        assert np.array_equal(everywhere, np.arange(1, self.pool.num_blocks)), "each block is in one place"

    def _copy_on_write(self, table: BlockTable, match: Match, slots: int, reserved: int) -> None:
        """Continue a match within a block in a private copy, unless the original then stands in the prompt's way."""
        needed = blocks_for_tokens(slots, self.block_size) - table.count
        assert match.child is not None
        source_evictable = 0 if match.child.locks else 1
        if needed + reserved > self.available - source_evictable:
            return
        table.source = self.tree.lock_source(match)
        self._copies.append(table)
        self._take(table, 1)
        table.computed = match.tokens

    def _take(self, table: BlockTable, count: int) -> None:
        short = count - self.pool.free_count
        if short > 0:
            self.tree.evict(short)
            self._evictions += short
        table.append(self.pool.allocate(count))

    def _drop_copy(self, table: BlockTable) -> None:
        """A copy that was not made brought nothing: what it stood for must never enter the tree."""
        if table.source is not None:
            self._copies.remove(table)
            self.tree.unlock(table.source)
            table.source = None
            table.computed = table.shared * self.block_size

    def _check_computed(self, table: BlockTable, tokens: Tokens) -> None:
        slots = table.count * self.block_size
        if table.computed > min(tokens.size, slots):
            raise ValueError(f"{table.computed} tokens are computed, of {tokens.size} and with {slots} slots for them")

    def _count(self, table: BlockTable) -> None:
        """Count a lookup once, of a request that went on to compute: one that waits may be admitted in vain often."""
        if table.queried and table.computed > table.cached:
            self._queried_tokens += table.queried
            self._hit_tokens += table.cached
            table.queried = 0


def _source(table: BlockTable) -> Node:
    assert table.source is not None, "a table that waits for a copy has its source"
    return table.source


def _path(node: Node | None) -> list[Node]:
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path
