"""A block cache that is slow and obvious, run beside the real one and compared with it after every operation.

Cached blocks are a flat dict of (namespace, all tokens up to the block's end) -> block, locks, time of last use. There
is no tree in it. Beside it stands the device's memory: each slot remembers the whole prefix of the token written to it,
so that a block reused too early, or a copy made too late, shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from octavo.kv.manager import KVCacheManager
from octavo.kv.radix import Namespace, Tokens
from octavo.kv.table import BlockTable

Key = tuple[Namespace, bytes]


def as_tokens(text: bytes) -> Tokens:
    """One token a byte, int32."""
    return np.frombuffer(text, np.uint8).astype(np.int32)


@dataclass
class Entry:
    block: int
    locks: int = 0
    used: int = 0


@dataclass
class Request:
    """A live request as the brute force sees it; `table` is the real cache's."""

    namespace: Namespace
    text: bytes
    use_cache: bool
    table: BlockTable
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    computed: int = 0
    source: Key | None = None


class BruteForce:
    """Does each operation twice, and raises AssertionError where the two differ."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.real = KVCacheManager(num_blocks, block_size)
        self.total = num_blocks - 1
        self.free = set(range(1, num_blocks))
        self.entries: dict[Key, Entry] = {}
        self.requests: list[Request] = []
        self.copies: list[Request] = []
        self.memory = [[0] * block_size for _ in range(num_blocks)]
        self.clock = self.evictions = self.hits = 0

    def admit(self, namespace: Namespace, text: bytes, use_cache: bool = True) -> Request:
        before = self.real.stats()
        found = self.real.peek(as_tokens(text), namespace)
        assert self.real.stats() == before, "peek changed something"
        request = Request(namespace, text, use_cache, self.real.admit(as_tokens(text), namespace, use_cache))
        self.requests.append(request)
        if use_cache:
            matches = {key: self.common(key, namespace, text[:-1]) for key in self.entries}
            longest = max(matches.values(), default=0)
            assert found == longest, f"peek found {found} tokens, {longest} are cached"
            request.shared = longest // self.size
            request.computed = request.shared * self.size
            request.blocks = [self.entries[key].block for key in self.path(request)]
            self.lock(*self.path(request))
            if longest > request.computed:
                self.expect_copy(request, longest, [key for key in matches if matches[key] == longest])
        self.hits += request.computed > 0
        self.compare(request)
        return request

    def grow(self, request: Request, tokens: int) -> bool:
        needed = self.blocks_for(tokens) - len(request.blocks)
        possible = needed <= len(self.free) + len(self.unlocked())
        before = self.real.stats()
        assert self.real.grow(request.table, tokens) == possible
        if possible:
            self.expect_taken(request, max(needed, 0))
        else:
            assert self.real.stats() == before, "a request that failed changed something"
        self.compare(request)
        return possible

    def take_copies(self) -> None:
        pairs = self.real.take_copies()
        assert len(pairs) == len(self.copies)
        for request, (source, destination) in zip(self.copies, pairs, strict=True):
            assert request.source is not None
            assert source == self.entries[request.source].block
            assert destination == request.blocks[request.shared]
            self.memory[destination] = list(self.memory[source])
            self.unlock(request.source)
            request.source = None
        self.copies.clear()
        self.compare()

    def compute(self, request: Request, tokens: int) -> None:
        """A step wrote keys and values up to `tokens`, through the real table."""
        identities = self.identities(request)
        for position in range(request.computed, tokens):
            block = int(request.table.blocks[position // self.size])
            assert self.size * request.shared <= position, "a request wrote to a shared block"
            self.memory[block][position % self.size] = identities[position]
        request.computed = request.table.computed = tokens

    def commit(self, request: Request) -> None:
        self.real.commit(request.table, as_tokens(request.text))
        self.expect_insert(request, request.computed // self.size)
        self.compare(request)

    def release(self, request: Request, insert: bool = True) -> None:
        self.real.release(request.table, as_tokens(request.text), insert)
        self.requests.remove(request)
        if request.source is not None:  # what the copy would have brought is not there
            self.unlock(request.source)
            self.copies.remove(request)
            request.computed = request.shared * self.size
        kept = request.shared
        path: list[Key] = []
        if request.use_cache:
            if insert:
                self.expect_insert(request, request.computed // self.size)
            kept, path = request.shared, list(self.path(request))
            if insert and request.computed % self.size:
                tail = (request.namespace, request.text[: request.computed])
                if not any(self.common(key, *tail) == request.computed for key in self.entries):
                    self.entries[tail] = Entry(request.blocks[kept], locks=1)
                    kept, path = kept + 1, [*path, tail]
        self.unlock(*path)
        self.free |= set(request.blocks[kept:])
        self.compare()

    def reset(self) -> None:
        self.real.reset()
        for key in self.unlocked():
            self.free.add(self.entries.pop(key).block)
        self.compare()

    def compare(self, request: Request | None = None) -> None:
        """Drop tails that add nothing, then compare all counts and the free blocks, and what the request has."""
        self.drop_redundant()
        stats, cached = self.real.stats(), len(self.unlocked())
        assert stats.free + stats.cached + stats.held == stats.total == self.total
        assert (stats.free, stats.cached) == (len(self.free), cached)
        assert stats.pinned == len(self.entries) - cached
        assert stats.evictions == self.evictions
        assert set(self.real.pool.free_blocks().tolist()) == self.free
        if request is not None:
            self.compare_request(request)

    def compare_tree(self) -> None:
        """Compare what is cached, and let the real cache check itself; slower."""
        assert dict(tree_entries(self.real)) == {key: entry.block for key, entry in self.entries.items()}
        self.real.check()

    def compare_request(self, request: Request) -> None:
        table = request.table
        assert (table.computed, table.shared) == (request.computed, request.shared)
        assert table.blocks.tolist() == request.blocks
        readable = request.computed if request.source is None else request.shared * self.size
        identities = self.identities(request)[:readable]
        for index in range(self.blocks_for(readable)):
            expected = identities[index * self.size : (index + 1) * self.size]
            assert self.memory[request.blocks[index]][: len(expected)] == expected, "keys and values of other tokens"

    def expect_copy(self, request: Request, longest: int, candidates: list[Key]) -> None:
        """Copy on write from one of the candidates, unless the prompt would not fit beside the locked original."""
        needed = self.blocks_for(len(request.text)) - request.shared
        rooms = {key: len(self.free) + len(self.unlocked() - {key}) for key in candidates}
        if request.table.source is None:
            assert any(needed > room for room in rooms.values()), "the copy was possible"
            return
        block = int(request.table.source.blocks[0])
        request.source = next(key for key in candidates if self.entries[key].block == block)
        assert needed <= rooms[request.source], "the prompt does not fit beside the copy"
        self.lock(request.source)
        self.copies.append(request)
        request.computed = longest
        self.expect_taken(request, 1)

    def expect_taken(self, request: Request, count: int) -> None:
        """`count` new blocks in the table, for which no more than needed was evicted, least recently used first."""
        for _ in range(count - len(self.free)):
            key = min(self.unlocked(), key=lambda key: (self.entries[key].used, -len(key[1])))
            assert not any(other != key and self.common(other, *key) == len(key[1]) for other in self.entries)
            self.free.add(self.entries.pop(key).block)
            self.evictions += 1
        new = request.table.blocks.tolist()[len(request.blocks) :]
        assert len(new) == count
        assert set(new) <= self.free, "a block that was not free was handed out"
        self.free -= set(new)
        request.blocks += new

    def expect_insert(self, request: Request, full: int) -> None:
        if not request.use_cache:
            return
        for index in range(request.shared, full):
            key = (request.namespace, request.text[: (index + 1) * self.size])
            own = request.blocks[index]
            entry = self.entries.setdefault(key, Entry(own))
            if entry.block != own:
                self.free.add(own)
                request.blocks[index] = entry.block
            self.lock(key)
        request.shared = full

    def drop_redundant(self) -> None:
        for key in [key for key in self.unlocked() if len(key[1]) % self.size]:
            start = len(key[1]) - len(key[1]) % self.size
            rivals = (other for other in self.entries if len(other[1]) > start and other != key)
            if any(self.common(other, *key) == len(key[1]) for other in rivals):
                self.free.add(self.entries.pop(key).block)

    def lock(self, *keys: Key) -> None:
        for key in keys:
            self.entries[key].locks += 1

    def unlock(self, *keys: Key) -> None:
        self.clock += 1
        for key in keys:
            self.entries[key].locks -= 1
            self.entries[key].used = self.clock

    def unlocked(self) -> set[Key]:
        return {key for key, entry in self.entries.items() if not entry.locks}

    def path(self, request: Request) -> Iterator[Key]:
        return ((request.namespace, request.text[: index * self.size]) for index in range(1, request.shared + 1))

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    @staticmethod
    def common(key: Key, namespace: Namespace, text: bytes) -> int:
        """Leading tokens that an entry and a text have in common; 0 across namespaces."""
        if key[0] != namespace:
            return 0
        shorter = min(len(key[1]), len(text))
        if key[1][:shorter] == text[:shorter]:
            return shorter
        return next(index for index in range(shorter) if key[1][index] != text[index])

    @staticmethod
    def identities(request: Request) -> list[int]:
        """For each token a number that stands for the whole prefix that ends with it."""
        start = hash(request.namespace)
        return list(accumulate(request.text, lambda before, token: hash((before, token)), initial=start))[1:]


def tree_entries(real: KVCacheManager) -> Iterator[tuple[Key, int]]:
    """The real tree, flattened."""
    texts: dict[int, bytes] = {}
    for node in real.tree.nodes():
        above = texts[id(node.parent)] if node.parent is not None else b""
        text = texts[id(node)] = above + node.tokens.astype(np.uint8).tobytes()
        for index, block in enumerate(node.blocks.tolist()):
            yield (node.namespace, text[: len(above) + (index + 1) * real.block_size]), block
