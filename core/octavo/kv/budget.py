"""From bytes to blocks, whether they suffice, and what a device's memory is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device's memory, by what they are for."""

    weights: int
    workspaces: int
    """What attention backends keep from the start."""
    activations: int
    """Most of them at a time: measured before the cache is made."""
    graphs: int
    """Of captured steps."""
    num_blocks: int
    """Block 0 included."""
    block_size: int
    """Tokens."""
    block_bytes: int
    """Of one block in all layers together."""

    @property
    def cache(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """What the cache holds."""
        return (self.num_blocks - 1) * self.block_size

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self) | {"cache": self.cache, "tokens": self.tokens}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """A small table for people."""
        yield "weights", _mebibytes(self.weights), ""
        yield "workspaces", _mebibytes(self.workspaces), "of attention"
        yield "activations", _mebibytes(self.activations), "at most, in one step"
        yield "graphs", _mebibytes(self.graphs), ""
        blocks = f"{self.num_blocks - 1} blocks of {self.block_size} tokens, {self.block_bytes / 1024:,.1f} KiB each"
        yield "cache", _mebibytes(self.cache), f"{blocks}: {self.tokens} tokens"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def blocks_for_bytes(available_bytes: int, block_bytes: int) -> int:
    """Blocks that `available_bytes` hold, block 0 included; `block_bytes` sums keys and values of all layers."""
    return max(available_bytes, 0) // block_bytes


def blocks_for_tokens(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` slots, rounded up."""
    return -(-tokens // block_size)


def refusal(num_blocks: int, block_size: int, block_bytes: int, max_total_tokens: int) -> str | None:
    """Why a cache of `num_blocks` (block 0 included) cannot hold one request of max_total_tokens; None if it can."""
    needed = blocks_for_tokens(max_total_tokens, block_size) + 1
    if needed <= num_blocks:
        return None
    capacity = max(num_blocks - 1, 0) * block_size
    return (
        f"max_total_tokens is {max_total_tokens}: one such request needs {needed} blocks of {block_size} tokens "
        f"(block 0 is reserved), {needed * block_bytes} bytes, but the cache has {num_blocks} blocks, "
        f"{num_blocks * block_bytes} bytes, for {capacity} tokens. Set max_total_tokens to at most {capacity}, "
        "or give the cache more memory."
    )
