"""Few combinations, and any two values in one of them."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from octavo.conformance.grids import all_pairs
from octavo.conformance.pairs import covering
from octavo_cpu.backend import FlashDecodingBackend
from octavo_reference.backend import ReferenceBackend
from tests.conformance.faults import Narrow


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_any_two_values_meet(counts: list[int]) -> None:
    rows = covering(counts)
    for one, other in combinations(range(len(counts)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(range(counts[one]), range(counts[other])))
    first, second, *_ = sorted(counts, reverse=True)
    assert first * second <= len(rows) <= 2 * first * second + len(counts)
    assert rows == covering(counts)


def test_what_is_declared_is_in_them() -> None:
    found = list(all_pairs(Narrow.capabilities))
    assert {(one.head_size, one.block_size) for one in found} == set(product((16, 24), (1, 16, 24)))
    assert {(one.dtype, one.kv_dtype) for one in found} == set(product(Narrow.capabilities.dtypes, repeat=2))
    assert {(one.softcap, one.sinks) for one in found} == set(product((None, 2.0), (False, True)))
    assert {(one.heads, one.alibi) for one in found} == set(product((2, 6, 7), (False, True)))
    assert {(one.window, one.block_size) for one in found} == set(product((None, 3, 21), (1, 16, 24)))


def test_of_many_sizes_few_are_taken() -> None:
    assert {one.head_size for one in all_pairs(FlashDecodingBackend.capabilities)} == {8, 24, 64, 512}
    assert len(list(all_pairs(ReferenceBackend.capabilities))) < 25
