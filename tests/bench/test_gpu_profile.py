"""Kernels of a GPU by place, and the time between them: of events that a profiler could give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.bench.gpu_profile import IDLE, OTHER_KERNELS, STEPS, kernels, profiled
from octavo.bench.profiler import ATTENTION, CACHE_WRITE, MATRIX_PRODUCTS


def event(name: str, start: float, end: float, where: str = "CUDA") -> Any:
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=where), time_range=SimpleNamespace(start=start, end=end)
    )


def test_times_add_up_to_the_span_and_what_overlaps_counts_once() -> None:
    events = [
        event("decode", 10, 40),
        event("nvjet_tst_64x32", 42, 52),
        event("write", 52, 53),
        event("void cublasLt::splitKreduce_kernel<32, 16, float>(cublasSplitKParams<float>)", 60, 61),
        event("triton_poi_fused_silu", 50, 60),
        event("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(params)", 61, 61),
        event("decode", 70, 75),
        event("Memcpy HtoD", 71, 73),
        event("cudaLaunchKernel", 0, 500, "CPU"),
    ]
    rows = kernels(events)
    places = {row.where: row for row in rows if not row.operator}
    assert {place: round(1e6 * row.seconds) for place, row in places.items()} == {
        ATTENTION: 35, MATRIX_PRODUCTS: 11, CACHE_WRITE: 0, OTHER_KERNELS: 8, IDLE: 11,
    }  # fmt: skip
    assert sum(row.seconds for row in places.values()) == pytest.approx(65e-6)
    assert (places[ATTENTION].calls, places[IDLE].calls) == (2, 2)
    operators = {row.operator: row.calls for row in rows if row.operator}
    assert operators == {
        "decode": 2, "nvjet_tst_64x32": 1, "write": 1, "triton_poi_fused_silu": 1, "Memcpy HtoD": 1,
        "cublasLt::splitKreduce_kernel": 1, "internal::gemvx::kernel": 1,
    }  # fmt: skip


def test_nothing_ran() -> None:
    assert all(row.seconds == 0 for row in kernels([]))


def test_too_few_steps_to_look_at() -> None:
    runner = cast(Any, SimpleNamespace(launch=lambda step: step))
    step = SimpleNamespace(context_lengths=[3], decodes=1)
    with pytest.raises(ValueError, match=f"looks at {STEPS + 5} steps .* there were 2: ask for longer answers"):
        profiled(runner, lambda: [runner.launch(step) for _ in range(2)])
