"""The free blocks of one cache: which ids may be handed out, and nothing else."""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]
"""Block ids, int32 [blocks]."""

NO_BLOCKS: Blocks = np.empty(0, np.int32)


class BlockPool:
    """A stack of the free ids 1 .. num_blocks - 1; block 0 is scratch that nobody owns.

    Attention on a CPU views neighbouring blocks where it would otherwise gather, so ids leave in ascending order:
    1, 2, 3 and so on from a fresh pool, later those freed last.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError if no block is left beside block 0."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, but block 0 is reserved: at least 2 are needed")
        self.num_blocks = num_blocks
        self.free_count = num_blocks - 1
        # Stack grows downwards, so that what is taken from its top stands in ascending order.
        self._stack: Blocks = np.arange(1, num_blocks, dtype=np.int32)
        self._is_free = np.ones(num_blocks, np.bool_)
        self._is_free[0] = False

    def allocate(self, count: int) -> Blocks:
        """Take `count` free blocks, ascending, int32 [count]. Raises ValueError, and takes none, if there are fewer."""
        if not 0 <= count <= self.free_count:
            raise ValueError(f"asked for {count} blocks, but {self.free_count} of {self.num_blocks - 1} are free")
        top = self._stack.size - self.free_count
        blocks = _ascending(self._stack[top : top + count].copy())
        for run in _runs(blocks):
            self._is_free[run] = False
        self.free_count -= count
        return blocks

    def release(self, blocks: Blocks) -> None:
        """Give back blocks, int32 [count], in any order.

        Raises ValueError, and takes none back, for block 0, an id out of range, one free already, one given twice.
        """
        if not blocks.size:
            return
        blocks = _ascending(blocks)
        if blocks[0] < 1 or blocks[-1] >= self.num_blocks:
            raise ValueError(f"blocks {blocks[0]} to {blocks[-1]} released, ids are 1 to {self.num_blocks - 1}")
        runs = _runs(blocks)
        for run in runs:
            if np.count_nonzero(self._is_free[run]):
                raise ValueError(f"a block was released that is free, among {blocks[:32].tolist()}")
        for run in runs:
            self._is_free[run] = True
        top = self._stack.size - self.free_count
        self._stack[top - blocks.size : top] = blocks
        self.free_count += blocks.size

    def free_blocks(self) -> Blocks:
        """The ids that are free now, the next to leave first, int32 [free_count]; a view, for checks."""
        return self._stack[self._stack.size - self.free_count :]

    def check(self) -> None:
        """Raise AssertionError unless stack and marks tell the same story."""
        assert np.array_equal(np.sort(self.free_blocks()), np.flatnonzero(self._is_free)), "marks and stack differ"
        assert not self._is_free[0], "block 0 is free"


def _ascending(blocks: Blocks) -> Blocks:
    """The ids in ascending order. Raises ValueError if one is there twice."""
    descents = _descents(blocks)
    if descents:
        # Mostly a few ascending runs behind each other: the stable sort merges those, the other is faster for a muddle.
        blocks = np.sort(blocks, kind="stable" if descents < 32 else "quicksort")
        if _descents(blocks):
            raise ValueError(f"a block was given twice, among {blocks[:32].tolist()}")
    return blocks


def _descents(blocks: Blocks) -> int:
    """How often an id does not exceed the one before."""
    return int(np.count_nonzero(blocks[1:] <= blocks[:-1])) if blocks.size > 1 else 0


def _runs(blocks: Blocks) -> list[slice] | list[Blocks]:
    """Indices that together pick ascending ids: slices of neighbours if those are long, some ten times faster."""
    if not blocks.size:
        return []
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first < blocks.size:
        return [slice(first, last + 1)]
    ends = np.flatnonzero(blocks[1:] - blocks[:-1] != 1)
    if 32 * ends.size > blocks.size:
        return [blocks]
    starts = [first, *blocks[ends + 1].tolist()]
    stops = [*blocks[ends].tolist(), last]
    return [slice(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]
