"""The suite itself is tested: each backend that is broken on purpose is caught, by the cases that are named."""

import pytest

from octavo.attention.device import CPU
from octavo.conformance.registry import CASES, trials
from tests.conformance.faults import Narrow
from tests.conformance.faulty_steps import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    broken, caught_by = FAULTS[name]
    missed = {case for case in caught_by if all(t.run().result == "passed" for t in trials(broken, CPU(), case))}
    assert missed == set()


def test_the_backend_that_is_broken_is_correct_otherwise() -> None:
    assert {str(trial): reason for trial in trials(Narrow, CPU()) if (reason := trial.run().reason)} == {}


def test_every_case_catches_a_fault() -> None:
    assert set().union(*(caught_by for _, caught_by in FAULTS.values())) == set(CASES)
