"""The suite itself is tested: each backend that is broken on purpose is caught, by the cases that are named."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.device import CPU
from octavo.conformance.registry import CASES, trials
from tests.conformance.table import FAULTS, PAGE, fails, read, written

DOCUMENTED = read(PAGE.read_text(encoding="utf-8"))
MEMORY = 9 << 30
"""Bytes of a cache whose offsets pass 2^31, twice: so much must be free."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    broken, caught_by = FAULTS[name]
    if name == "offsets of 32 bits" and CPU().memory().free < MEMORY:
        pytest.skip(f"{CPU().memory().free} bytes are free, offsets of more than 32 bits take {MEMORY}")
    missed = {case for case in caught_by if not any(map(fails, trials(broken, CPU(), case)))}
    assert missed == set()


def test_the_page_has_every_broken_backend_with_its_cases() -> None:
    """If not: python -m tests.conformance.table."""
    assert list(DOCUMENTED) == list(FAULTS)
    assert len(FAULTS) >= 25
    assert {name: caught_by - DOCUMENTED[name] for name, (_, caught_by) in FAULTS.items()} == dict.fromkeys(
        FAULTS, frozenset()
    )
    assert set().union(*DOCUMENTED.values()) == set(CASES)


def test_a_case_that_no_fault_needs_is_justified() -> None:
    """It is needed if it alone catches one; the page says of the others in a sentence why they are there."""
    alone = Counter(case for cases in DOCUMENTED.values() if len(cases) == 1 for case in cases)
    section = PAGE.read_text(encoding="utf-8").split("<!-- unneeded -->")[1]
    justified = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.MULTILINE))
    assert justified.keys() == CASES.keys() - alone.keys()
    assert all(len(sentence.split()) > 5 for sentence in justified.values())


@given(st.lists(st.lists(st.sampled_from(list(CASES)), unique=True, min_size=1), min_size=1, max_size=9))
def test_the_table_can_be_read_again(caught: list[list[str]]) -> None:
    rows = {f"fault, number {number}": cases for number, cases in enumerate(caught)}
    page = f"before\n<!-- faults -->\n{written(rows)}<!-- end -->\n| a | `decode` |\n"
    assert read(page) == {name: set(cases) for name, cases in rows.items()}
