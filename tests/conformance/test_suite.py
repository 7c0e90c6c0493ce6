"""The pytest class that third parties subclass."""

from dataclasses import replace

import pytest
import torch

from octavo.attention.device import CPU
from octavo.conformance import Suite
from octavo.conformance.registry import trials
from tests.conformance.faults import Narrow

pytest_plugins = ["pytester"]

THIRD_PARTY = """
from octavo.conformance import Suite
from tests.conformance.faults import FAULTS
from tests.conformance.minimal import MinimalBackend

class Narrow(MinimalBackend):
    capabilities = FAULTS["soft cap dropped"][0].capabilities

class Elsewhere(Narrow):
    @classmethod
    def probe(cls, device):
        return f"it needs a card, and {device.name} is none"

class TestGood(Suite):
    backend = Narrow

    def test_of_its_own_features(self):
        assert self.backend is Narrow

class TestBad(Suite):
    backend = FAULTS["soft cap dropped"][0]
    left_out = ("pairs",)

class TestElsewhere(Suite):
    backend = Elsewhere
"""


@pytest.fixture
def third_party(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_third_party=THIRD_PARTY)
    return pytester


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *arguments)


def test_a_correct_backend_passes(third_party: pytest.Pytester) -> None:
    outcomes = run(third_party, "-k", "TestGood and features").parseoutcomes()
    assert outcomes.pop("passed") > 5
    assert outcomes.keys() <= {"deselected"}


def test_a_broken_one_fails_where_it_is_broken(third_party: pytest.Pytester) -> None:
    result = run(third_party, "-k", "TestBad and features")
    assert result.parseoutcomes()["failed"] == 3  # capped, all together in fp32, and in bf16
    result.stdout.fnmatch_lines(
        ["Every declared feature* layer 0, row 0 (1 new of 17 tokens): error * (limit 1e-05), correlation *"]
    )


def test_cases_can_be_left_out(third_party: pytest.Pytester) -> None:
    items, _ = third_party.inline_genitems()
    of_pairs = {item.nodeid.split("::")[1] for item in items if "[pairs[" in item.nodeid}
    assert of_pairs == {"TestGood", "TestElsewhere"}


def test_a_backend_that_cannot_run_here_is_skipped_with_its_reason(third_party: pytest.Pytester) -> None:
    result = run(third_party, "-k", "TestElsewhere and layers")
    assert set(result.parseoutcomes()) == {"skipped", "deselected"}
    result.stdout.fnmatch_lines(["*it needs a card, and cpu is none*"])


def test_trials_run_on_one_thread() -> None:
    """Two on small tensors wait for each other most of the time."""
    seen: list[int] = []
    (trial,) = trials(Narrow, CPU(), only="layers")
    case = replace(trial.case, play=lambda stage: seen.append(torch.get_num_threads()))

    class OfNarrow(Suite):
        backend = Narrow

    torch.set_num_threads(2)
    try:
        OfNarrow().test_conformance(replace(trial, case=case))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1]
