"""The blocks of one request."""

from dataclasses import dataclass, field

import numpy as np

from octavo.kv.node import Namespace, Node
from octavo.kv.pool import NO_BLOCKS, Blocks


@dataclass(slots=True, eq=False)
class BlockTable:
    """What one request owns in the cache. The manager changes it; only `computed` is for the scheduler to advance."""

    namespace: Namespace
    computed: int = 0
    """Leading tokens whose keys and values are written (or will be by the copy that `source` stands for)."""
    cached: int = 0
    """Tokens of `computed` that were found at admission."""
    queried: int = 0
    """Prompt tokens that were looked up at admission; 0 once they are in the statistics."""
    shared: int = 0
    """Leading blocks that belong to the prefix tree; the rest are this request's alone."""
    node: Node | None = None
    """The locked tree node in which the shared blocks end; None for a request that stays out of the tree."""
    source: Node | None = None
    """The locked node whose first block is still to be copied into `blocks[shared]`."""
    count: int = 0
    """Blocks in use."""
    storage: Blocks = field(default_factory=lambda: NO_BLOCKS)
    """Room for block ids, of which the first `count` count."""

    @property
    def blocks(self) -> Blocks:
        """The request's block ids in token order, int32 [count]: a view, valid until the table grows."""
        return self.storage[: self.count]

    def append(self, blocks: Blocks) -> None:
        """Add blocks, int32 [any], at the end."""
        count = self.count + blocks.size
        if count > self.storage.size:
            storage = np.empty(max(count, 2 * self.storage.size), np.int32)
            storage[: self.count] = self.blocks
            self.storage = storage
        self.storage[self.count : count] = blocks
        self.count = count
