"""Few combinations in which any two values meet: what two features share breaks where both are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

Cell = tuple[int, int]
"""A factor, and which of its values."""


def covering(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows with one value, from 0, of each factor, such that any two values of two factors share a row.

    `counts`: how many values each factor has. Row by row, each value that meets the most new ones (the greedy way of
    AETG, Cohen et al. 1997): not the fewest rows that there can be, and always the same.
    """
    left = dict.fromkeys(
        pair
        for one, other in combinations(range(len(counts)), 2)
        for pair in product(_cells(one, counts), _cells(other, counts))
    )
    rows: list[tuple[int, ...]] = []
    used: Counter[Cell] = Counter()
    while left:
        row = _row(next(iter(left)), counts, left, used)
        for pair in combinations(row, 2):
            left.pop(pair, None)
        used.update(row)
        rows.append(tuple(value for _, value in row))
    return rows


def _cells(factor: int, counts: Sequence[int]) -> list[Cell]:
    return [(factor, value) for value in range(counts[factor])]


def _row(
    first: tuple[Cell, Cell], counts: Sequence[int], left: dict[tuple[Cell, Cell], None], used: Counter[Cell]
) -> list[Cell]:
    """A pair that has not met yet, and for every other factor what meets the most, or else was used least."""
    row = list(first)
    for factor in range(len(counts)):
        if factor not in (first[0][0], first[1][0]):
            row.append(
                max(
                    _cells(factor, counts),
                    key=lambda cell: (sum((min(cell, own), max(cell, own)) in left for own in row), -used[cell]),
                )
            )
    return sorted(row)
