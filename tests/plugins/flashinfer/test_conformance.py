"""The whole suite, over a stand-in for FlashInfer: what octavo tells it and hands to it is right."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.attention.contract import AttentionBatch, HostLengths
from octavo.attention.device import CPU
from octavo.conformance import Suite
from octavo.conformance.registry import trials
from tests.plugins.flashinfer.on_cpu import OnCPU


class TestFlashInfer(Suite):
    backend = OnCPU


class Told(OnCPU):
    """Core gives all lengths on the host: the device's, which are wrong here, are not asked for."""

    name = "told"

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        host = HostLengths(batch.query_starts.numpy().copy(), batch.context_lengths.numpy().copy())
        wrong = torch.full_like(batch.context_lengths, 7919)
        step = replace(batch, host_lengths=host, context_lengths=wrong, query_starts=batch.query_starts * 7)
        return super().plan(step, bucket)


class Ampere(OnCPU):
    """Has one kernel for prompts and for decoding on tensor cores."""

    name = "ampere"

    def capability(self) -> int:
        return 8


@pytest.mark.parametrize("kind", [Told, Ampere])
@pytest.mark.parametrize("case", ["mixed", "replay-decode", "head-groups", "idle-rows", "features", "fp8-scales"])
def test_otherwise(kind: type[OnCPU], case: str) -> None:
    outcomes = {str(trial): trial.run() for trial in trials(kind, CPU(), case)}
    assert {name: one.reason for name, one in outcomes.items() if one.result != "passed"} == {}
    assert outcomes
