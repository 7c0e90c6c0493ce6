import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv.pool import BlockPool, Blocks


def ids(*blocks: int) -> Blocks:
    return np.array(blocks, np.int32)


def test_block_0_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert pool.free_count == 4
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="asked for 1 blocks, but 0 of 4 are free"):
        pool.allocate(1)


def test_a_pool_needs_a_block_beside_block_0() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)


def test_a_fresh_pool_gives_ascending_runs() -> None:
    pool = BlockPool(10)
    assert [pool.allocate(count).tolist() for count in (3, 0, 1, 2)] == [[1, 2, 3], [], [4], [5, 6]]


def test_what_was_freed_last_leaves_first_in_ascending_order() -> None:
    pool = BlockPool(12)
    pool.allocate(11)
    pool.release(ids(9, 3, 4))
    pool.release(ids(2))
    assert pool.allocate(1).tolist() == [2]
    assert pool.allocate(2).tolist() == [3, 4]
    pool.release(ids(5))
    assert pool.allocate(2).tolist() == [5, 9]


def test_blocks_of_several_releases_come_in_ascending_order() -> None:
    pool = BlockPool(12)
    pool.allocate(11)
    pool.release(ids(1, 2))
    pool.release(ids(7, 8))
    assert pool.allocate(4).tolist() == [1, 2, 7, 8]


@pytest.mark.parametrize("blocks", [(0,), (-1,), (5,), (2, 2), (3, 1, 3), (4,), (1, 4), (1, 2, 3, 4)])
def test_a_wrong_release_is_refused_whole(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(5)
    pool.allocate(3)  # 4 is free
    with pytest.raises(ValueError, match="block"):
        pool.release(ids(*blocks))
    assert pool.free_count == 1
    pool.check()
    pool.release(ids(3, 1, 2))
    assert pool.free_count == 4


@settings(deadline=None)
@given(st.data())
def test_every_block_is_free_or_held_once(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 300))
    pool = BlockPool(total + 1)
    held: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and held:
            some = data.draw(st.sets(st.sampled_from(sorted(held))))
            pool.release(ids(*some))
            held -= some
        else:
            new = pool.allocate(data.draw(st.integers(0, pool.free_count))).tolist()
            assert new == sorted(set(new) - held)
            held |= set(new)
        pool.check()
        assert set(pool.free_blocks().tolist()) == set(range(1, total + 1)) - held
