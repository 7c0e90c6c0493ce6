"""From bytes to blocks, and whether they suffice."""


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
