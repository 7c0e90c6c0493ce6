"""The ROCm backends with each chip's own tiles in Triton's interpreter, by the conformance suite, without a GPU.

Chosen cases; OCTAVO_FULL_MATRIX=1 takes all of them for each chip (-k gfx942: for one), but not `generation`, in which
models run hundreds of steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import pytest

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.conformance import Suite, grids
from octavo.conformance.registry import CASES, Trial, trials
from octavo_triton import launch
from tests.backends.rocm.interpreted import BACKENDS, CHIPS, on
from tests.backends.triton.interpreter import interpreted

FULL = os.environ.get("OCTAVO_FULL_MATRIX") == "1"
CHOSEN = {
    ("gfx90a", "flashdecoding"): {"mixed", "batch-invariant"},
    ("gfx90a", "paged"): {"resumed-prefill", "shared-blocks"},
    ("gfx942", "flashdecoding"): {"fp8-scales"},
    ("gfx942", "paged"): {"dtypes"},
    ("gfx950", "flashdecoding"): {"block-sizes"},
    ("gfx950", "paged"): {"features"},
    ("gfx1100", "flashdecoding"): {"decode"},
    ("gfx1100", "paged"): {"block-sizes"},
    ("gfx1201", "flashdecoding"): {"head-sizes"},
    ("gfx1201", "paged"): {"mixed", "head-groups"},
}

# A capped logit of 1e5 has an infinite exponential, as the kernels mean it to have: numpy warns of it, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "_WRITTEN", 256)
    with interpreted():
        yield


def tried(*, whole: bool) -> dict[str, Trial]:
    """By chip, backend, case and configuration."""
    return {
        f"{chip}-{kind.name}-{trial}": trial
        for chip in CHIPS
        for kind in BACKENDS
        for trial in trials(on(chip, kind), CPU())
        if trial.case.name in (CASES.keys() - {"generation"} if whole else CHOSEN[chip, kind.name])
    }


class TestOnEveryChip(Suite):
    backend: ClassVar[type[AttentionBackend]] = on(CHIPS[0], BACKENDS[0])

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "trial" in metafunc.fixturenames:
            found = tried(whole=FULL)
            metafunc.parametrize("trial", found.values(), ids=found)


def test_what_is_chosen_has_every_size_dtype_and_feature_once() -> None:
    assert all(CHOSEN[chip, kind.name] for chip in CHIPS for kind in BACKENDS)
    chosen = [trial.configuration for trial in tried(whole=False).values()]
    for kind in BACKENDS:
        declared = kind.capabilities
        assert {one.block_size for one in chosen} >= set(grids.block_sizes(declared))
        assert {one.head_size for one in chosen} >= set(grids.head_sizes(declared))
        assert {one.dtype for one in chosen} >= set(declared.dtypes)
        assert {one.kv_dtype for one in chosen} >= set(declared.kv_dtypes)
        assert {feature for one in chosen for feature in one.spec.features} >= declared.features
