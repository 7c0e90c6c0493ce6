"""The statistics of `octavo bench tenants`, against every case counted out and against known distributions."""

from itertools import product

import numpy as np
import pytest

from octavo.bench.tenants import interval, p_value


def counted(differences: list[float]) -> float:
    """Wilcoxon's p by all of the signs that there are."""
    order = sorted(range(len(differences)), key=lambda place: abs(differences[place]))
    ranks = {place: rank + 1 for rank, place in enumerate(order)}
    found = abs(sum(ranks[place] * (1 if one > 0 else -1) for place, one in enumerate(differences)))
    sums = [
        abs(sum(ranks[place] * sign for place, sign in enumerate(signs)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return sum(one >= found for one in sums) / len(sums)


@pytest.mark.parametrize(
    "differences",
    [
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        [-1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0, 8.5],
        [0.1, -0.2, 0.3, -0.4, 9.0],
    ],
)
def test_p_is_that_of_all_signs(differences: list[float]) -> None:
    """Drawn ten thousand times, it is within five of its standard deviations."""
    exact = counted(differences)
    drawn = p_value(np.array(differences), np.random.default_rng(1))
    assert abs(drawn - exact) < 5 * (exact * (1 - exact) / 10_000) ** 0.5 + 1e-4


def test_p_is_even_where_there_is_no_difference() -> None:
    """Of 200 draws that differ by chance alone, about one in ten is below 0.1."""
    random = np.random.default_rng(2)
    found = np.array([p_value(random.standard_cauchy(30), random) for _ in range(200)])
    assert 5 < (found < 0.1).sum() < 40


def test_a_small_difference_in_much_noise_is_seen() -> None:
    random = np.random.default_rng(3)
    differences = random.normal(1, 4, 300)
    assert p_value(differences, random) < 0.01
    low, high = interval(differences, random)
    assert 0 < low < 1 < high < 2


def test_the_interval_holds_the_median() -> None:
    """Of 100 samples it leaves the true one out about five times."""
    random = np.random.default_rng(4)
    held = [low <= 2 <= high for low, high in (interval(random.normal(2, 5, 60), random) for _ in range(100))]
    assert 87 <= sum(held) <= 100
