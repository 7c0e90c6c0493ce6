"""octavo bench kernels --tune: the best shape of each phase comes first, whatever the batches take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU, Device
from octavo.attention.select import Selection
from octavo.bench import kernels
from octavo.bench.batches import Batch
from octavo.bench.kernels import by_phase
from octavo.bench.tune import tuned
from octavo_reference.backend import ReferenceBackend
from tests.bench.test_kernels import options
from tests.bench.test_report import units_are_named

SPEC = AttentionSpec(
    layers=1, heads=2, kv_heads=1, head_size=8, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
)  # fmt: skip


class Shaped(ReferenceBackend):
    name = "shaped"
    tunables: ClassVar[Any] = {"decode": [{"keys": keys} for keys in (1, 2, 3, 4)], "prefill": [{"keys": 7}]}

    def __init__(
        self, spec: AttentionSpec, block_size: int, device: Device, options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, block_size, device, None, sinks)
        self.shape = dict(options or {})
        if self.shape == {"decode": {"keys": 3}}:
            raise RuntimeError("out of resource: shared memory")


TAKEN = {1: {"short": 3.0, "long": 100.0}, 2: {"short": 1.0, "long": 200.0}, 4: {"short": 1.2, "long": 110.0}}


def timed(backend: Any, batch: str) -> float:
    if not backend.shape:
        return {"short": 2.0, "long": 100.0, "prompt": 5.5}[batch]
    ((phase, shape),) = backend.shape.items()
    return TAKEN[shape["keys"]][batch] if phase == "decode" else 5.0


def test_the_geometric_mean_of_ratios_decides_and_what_does_not_run_is_left_out() -> None:
    selection = Selection(Shaped, "cpu", 16, (), (), Shaped.capabilities)
    told: list[str] = []
    rows = tuned(selection, SPEC, CPU(), {"decode": ["short", "long"], "prefill": ["prompt"]}, timed, told.append)
    asked = [str(row["options"]) for row in rows]
    assert [asked.pop(at) for at in (1, 4)] == ["as it is"] * 2
    assert [json.loads(one) for one in asked] == [
        {"decode": {"keys": 4}}, {"decode": {"keys": 2}}, {"decode": {"keys": 1}}, {"prefill": {"keys": 7}},
    ]  # fmt: skip
    expected = [(1.2 * 1.1) ** 0.5, 2**0.5, 2**0.5, 3**0.5, 1.0, 1.1]
    assert [row["time_ratio"] for row in rows] == pytest.approx(expected, abs=1e-4)
    assert {row["phase"] for row in rows[:4]} == {"decode"}
    assert len(told) == 7
    assert units_are_named(rows)


def test_a_phase_without_batches_is_not_tuned() -> None:
    selection = Selection(Shaped, "cpu", 16, (), (), Shaped.capabilities)
    rows = tuned(selection, SPEC, CPU(), {"decode": [], "prefill": ["prompt"]}, timed, lambda _: None)
    assert [row["phase"] for row in rows] == ["prefill"] * 2


def test_a_backend_without_shapes_says_so(quick: None) -> None:
    with pytest.raises(ValueError, match="any/reference offers no shapes to choose from: leave out --tune"):
        kernels.run(options(attention=["any/reference"], tune=True), lambda _: None)


def test_the_bench_tunes_on_its_own_batches(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALL", [Batch.decodes(2, 20), Batch.prompts(1, 5)])
    monkeypatch.setattr(kernels, "choose", lambda *_, **__: Selection(Shaped, "cpu", 16, (), (), Shaped.capabilities))
    report = kernels.run(options(attention=["any/shaped"], tune=True), lambda _: None)
    assert report.bench == "tuning"
    assert [row["phase"] for row in report.rows] == ["decode"] * 4 + ["prefill"] * 2
    assert '{"prefill":{"keys":7}}' in report.markdown()


def test_a_batch_is_of_one_phase_or_of_none() -> None:
    mixed = Batch("both", (9, 20), (1, 5))
    phases = by_phase([Batch.decodes(2, 20), Batch.prompts(1, 5), mixed])
    assert [[batch.name for batch in phases[phase]] for phase in ("decode", "prefill")] == [["2 x 20"], ["1 x 5"]]
