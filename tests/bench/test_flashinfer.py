"""FlashInfer raw beside octavo's backend that runs it: both as a captured step has them, and both right."""

import pytest

from octavo.bench import flashinfer, kernels, peers
from octavo.bench.flashinfer import FlashInferBackend
from tests.bench.test_kernels import options
from tests.distributions import Offers, plugins_of
from tests.plugins.flashinfer import library
from tests.plugins.flashinfer.conftest import _flashinfer as stand_in
from tests.plugins.flashinfer.on_cpu import OnCPU

__all__ = ["stand_in"]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a CPU for a GPU."""
    monkeypatch.setattr(FlashInferBackend, "probe", classmethod(lambda cls, device: None))
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1 << 24)


def test_both_are_rows_of_one_run(quick: None) -> None:
    chosen = options(
        attention=["peer/flashinfer", "imagined/flashinfer"], head_size=64, dtypes=["bfloat16"], batches=["8 x 512"],
        heads=["4/2", "2/2"], kv_dtypes=["bfloat16", "fp8_e4m3fn"], block_sizes=[1, 16],
    )  # fmt: skip
    report = kernels.run(chosen, lambda _: None, plugins_of(peers, Offers([OnCPU])))
    assert [row.get("fault") for row in report.rows] == [None] * 2 * 2 * 2 * 2
    assert {row["backend"] for row in report.rows} == {"peer/flashinfer", "imagined/flashinfer"}
    assert all(isinstance(row["attend_seconds"], float) for row in report.rows)
    ran = [wrapper for wrapper in library.Wrapper.made if wrapper.launched]
    assert len(ran) == len(report.rows), "only a captured step's wrapper writes down what it launches"


def test_prompts_are_not_for_the_peer(quick: None) -> None:
    chosen = options(attention=["peer/flashinfer"], head_size=64, dtypes=["bfloat16"], batches=["2 x 128"])
    report = kernels.run(chosen, lambda _: None, plugins_of(peers, Offers([OnCPU])))
    assert [row["phase"] for row in report.rows] == ["prefill"]
    assert "say --only decode" in str(report.rows[0]["fault"])
