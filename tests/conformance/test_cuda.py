"""The suite on a GPU, where steps are captured for real; skipped on machines without one."""

from typing import Any

import pytest
import torch

from octavo.attention.contract import AttentionBatch
from octavo.attention.device import CUDA
from octavo.conformance import Suite
from octavo.conformance.registry import trials
from octavo_cuda.backend import FlashDecodingBackend, PagedBackend
from octavo_reference.backend import ReferenceBackend
from tests.conformance.vectorised import TokenPlan, Vectorised

pytestmark = pytest.mark.skipif(CUDA.unavailable() is not None, reason=str(CUDA.unavailable()))


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


if CUDA.unavailable() is None:

    class TestReference(Suite):
        backend = ReferenceBackend
        device = CUDA

    class TestVectorised(Suite):
        backend = Vectorised
        device = CUDA

    class TestFlashDecoding(Suite):
        backend = FlashDecodingBackend
        device = CUDA

    class TestPaged(Suite):
        backend = PagedBackend
        device = CUDA


class Stale(Vectorised):
    """Gives the captured object again, and does not refresh it."""

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> TokenPlan:
        held: dict[Any, TokenPlan] = self.__dict__.setdefault("held", {})
        key = (bucket, len(batch.slots))
        return held[key] if bucket is not None and key in held else super().plan(batch, bucket)


class Moved(Vectorised):
    """Refreshes the object by new tensors, which a graph does not see."""

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> TokenPlan:
        new = self._plan(batch, 24)
        if bucket is None:
            return new
        held: TokenPlan = self.__dict__.setdefault("held_plan", new)
        object.__setattr__(held, "slots", new.slots)
        object.__setattr__(held, "hidden", new.hidden)
        return held


@pytest.mark.parametrize("broken", [Stale, Moved])
def test_a_captured_step_that_goes_stale_is_caught(broken: type[Vectorised]) -> None:
    outcomes = [trial.run() for trial in trials(broken, CUDA(), "replay-decode")]
    assert {outcome.result for outcome in outcomes} == {"failed"}


def test_a_host_look_during_capture_is_an_error() -> None:
    class Looking(Vectorised):
        def attend(self, query: Any, *rest: Any) -> Any:
            float(query.sum())
            return super().attend(query, *rest)

    outcome = trials(Looking, CUDA(), "replay-mixed")[0].run()
    assert outcome.result == "error"
