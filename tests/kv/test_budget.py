import pytest

from octavo.kv.budget import blocks_for_bytes, blocks_for_tokens, refusal


@pytest.mark.parametrize(("available", "blocks"), [(-5, 0), (0, 0), (99, 0), (100, 1), (1099, 10)])
def test_blocks_for_bytes(available: int, blocks: int) -> None:
    assert blocks_for_bytes(available, 100) == blocks


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 299), (16, 19), (64, 5), (256, 2)])
def test_blocks_for_tokens(block_size: int, blocks: int) -> None:
    assert blocks_for_tokens(299, block_size) == blocks
    assert blocks_for_tokens(0, block_size) == 0
    assert blocks_for_tokens(block_size, block_size) == 1


def test_a_request_of_exactly_the_cache_needs_block_0_besides() -> None:
    assert refusal(num_blocks=5, block_size=16, block_bytes=10, max_total_tokens=64) is None
    text = refusal(num_blocks=4, block_size=16, block_bytes=10, max_total_tokens=64)
    assert text is not None
    for number in ("max_total_tokens is 64", "5 blocks of 16 tokens", "50 bytes", "4 blocks", "40 bytes", "at most 48"):
        assert number in text
