"""A node of the prefix tree, and how runs of tokens are compared."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv.pool import Blocks

Tokens = npt.NDArray[np.int32]
"""Token ids, int32 [tokens]."""

NO_TOKENS: Tokens = np.empty(0, np.int32)


class Namespace(NamedTuple):
    """Whom a cached prefix belongs to. Prefixes never cross namespaces; each field is always compared."""

    adapter: str = ""
    adapter_generation: int = 0
    tenant: str = ""
    salt: str = ""
    """Narrows further within the tenant, as a request may ask."""
    images: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens behind its parent's, and the blocks that hold it.

    Only the last block of a leaf may be partly filled. A root has no parent and no tokens.
    """

    namespace: Namespace
    tokens: Tokens
    blocks: Blocks
    parent: "Node | None" = field(default=None, repr=False)
    key: bytes = b""
    """The first block's tokens: what the parent knows this child by."""
    locks: int = 0
    """Locks on this node and on any below it."""
    used: float = 0.0
    """When the last lock was taken off, of the clock time.monotonic."""
    children: dict[bytes, "Node"] = field(default_factory=dict, repr=False)
    order: list[bytes] = field(default_factory=list, repr=False)
    """The children's keys, sorted."""

    def link(self, child: "Node") -> None:
        """Add a child."""
        self.children[child.key] = child
        self.order.insert(bisect_left(self.order, child.key), child.key)

    def unlink(self, child: "Node") -> None:
        """Remove a child."""
        del self.children[child.key]
        del self.order[bisect_left(self.order, child.key)]

    def closest(self, tokens: Tokens) -> tuple["Node | None", int]:
        """The child that shares most leading tokens with `tokens`, and how many; None if none shares any.

        In sorted order it is a neighbour of the place where `tokens` would stand.
        """
        best, most = None, 0
        if self.order and tokens.size:
            place = bisect_left(self.order, key_of(tokens))
            for key in self.order[max(place - 1, 0) : place + 1]:
                child = self.children[key]
                if (common := common_prefix(child.tokens, tokens)) > most:
                    best, most = child, common
        return best, most

    def shorter(self, key: bytes) -> "Node | None":
        """The child whose partly filled block holds the beginning of `key`."""
        place = bisect_left(self.order, key)
        if place and key.startswith(self.order[place - 1]):
            return self.children[self.order[place - 1]]
        return None

    def has_longer(self, key: bytes) -> bool:
        """Is there a child, other than that of `key` itself, whose first block begins like `key`?"""
        place = bisect_left(self.order, key)
        place += key in self.children
        return place < len(self.order) and self.order[place].startswith(key)


def key_of(tokens: Tokens) -> bytes:
    """Tokens as bytes. Equal keys are equal tokens: a dict compares them. Keys that begin alike sort side by side."""
    return tokens.astype(np.int32, copy=False).tobytes()


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix, in tokens."""
    size = min(left.size, right.size)
    if not size:
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def own(view: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The view itself, or a copy once it keeps more than twice its size alive."""
    return view.copy() if view.base is not None and view.base.size > 2 * view.size else view
