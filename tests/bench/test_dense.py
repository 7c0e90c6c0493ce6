"""The floor: PyTorch's attention on keys that lie one behind the other answers every batch rightly."""

import pytest
import torch

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU
from octavo.attention.installed import backends
from octavo.bench import kernels
from octavo.bench.batches import Batch
from octavo.bench.dense import DenseBackend
from octavo.bench.inputs import Inputs
from octavo.plugins import plugins
from tests.bench.test_kernels import options

BATCHES = [
    Batch.decodes(3, 40), Batch.prompts(2, 20), Batch.prompts(1, 7, 30),
    Batch("all kinds", (9, 9, 5, 30, 30, 41), (1, 1, 1, 30, 30, 4)),
]  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
@pytest.mark.parametrize(("heads", "dtype"), [(2, torch.float32), (6, torch.float32), (6, torch.bfloat16)])
def test_what_it_answers_is_right(batch: Batch, heads: int, dtype: torch.dtype) -> None:
    """In the calls that are timed too, which copy nothing."""
    spec = AttentionSpec(layers=1, heads=heads, kv_heads=2, head_size=16, scale=0.25, dtype=dtype, kv_dtype=dtype)
    inputs = Inputs(spec, batch, torch.device("cpu"))
    attending = inputs.attending(DenseBackend(spec, 16, CPU()))
    for _ in range(2):
        attending()
        inputs.error(attending.answer)


def test_keys_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(
        layers=1, heads=4, kv_heads=2, head_size=8, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
    )  # fmt: skip
    attending = Inputs(spec, BATCHES[0], torch.device("cpu")).attending(DenseBackend(spec, 16, CPU()))
    attending()
    monkeypatch.setattr(DenseBackend, "_runs", None)
    attending()


def test_a_table_of_several_dtypes(quick: None) -> None:
    report = kernels.run(
        options(attention=["dense"], dtypes=["float32", "bfloat16"], batches=["2 x 128"]), lambda _: None
    )
    assert [(row["backend"], row["dtype"], row["cache"]) for row in report.rows] == [
        ("peer/dense", "float32", "float32"), ("peer/dense", "bfloat16", "bfloat16"),
    ]  # fmt: skip
    assert report.workload["dtype"] == "float32, bfloat16"


def test_it_serves_nobody() -> None:
    assert "peer/dense" not in {one.kind.qualified_name() for one in backends(plugins())}
    assert DenseBackend.priority < 0
