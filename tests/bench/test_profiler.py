"""Where time goes: made-up events by hand, then a run of a tiny model, of which nothing may be lost."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.bench.job import ProfileRow
from octavo.bench.profiler import PLACES, PYTHON, grouped, profiled


@dataclass(frozen=True)
class Made:
    name: str
    cpu_parent: "Made | None"
    self_cpu_time_total: float


def test_time_goes_to_the_innermost_range() -> None:
    run = Made("octavo: Python in the engine", None, 5e6)
    model = Made("octavo: Python and compiled code in the model", run, 4e6)
    attention = Made("octavo: attention", model, 3e6)
    linear = Made("aten::linear", model, 0.5e6)
    events = [
        run, model, attention, linear,
        Made("aten::addmm", linear, 2e6), Made("aten::bmm", attention, 1e6), Made("aten::mul", model, 0.25e6),
        Made("aten::mul", model, 0.25e6), Made("aten::argmax", Made("octavo: sampling", run, 0.0), 0.125e6),
        Made("aten::empty", None, 9e6),
    ]  # fmt: skip
    rows = grouped(events)
    assert [(row.where, row.seconds, row.calls) for row in rows if not row.operator] == [
        ("matrix products", 2.5, 2),
        ("attention", 4.0, 2),
        ("cache write", 0.0, 0),
        ("sampling", 0.125, 1),
        ("the model's other operators", 0.5, 2),
        ("Python and compiled code in the model", 4.0, 1),
        ("Python in the engine", 5.0, 1),
    ]
    assert ProfileRow("attention", "aten::bmm", 1.0, 1) in rows
    assert ProfileRow("attention", PYTHON, 3.0, 1) in rows
    assert [row.operator for row in rows if row.where == "matrix products"] == ["", "aten::addmm", "aten::linear"]


@pytest.mark.parametrize(
    ("operator", "product"),
    [
        ("aten::mm", True), ("aten::linear", True), ("mkldnn::_linear_pointwise", True), ("aten::matmul", True),
        ("mkl::_mkl_linear", True), ("aten::mul", False), ("aten::silu", False), ("aten::_softmax", False),
    ],
)  # fmt: skip
def test_matrix_products_are_known_by_name(operator: str, product: bool) -> None:
    model = Made("octavo: Python and compiled code in the model", None, 0.0)
    products = grouped([Made(operator, model, 1e6)])[0]
    assert (products.where, products.seconds) == ("matrix products", 1.0 if product else 0.0)


def test_a_run_is_accounted_for(tiny: Path) -> None:
    llm = LLM(tiny, progress=False, max_batch_total_tokens=4096)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5]]
    expected = llm.generate(prompts, params, progress=False)
    llm.engine.scheduler.kv.reset()

    def run() -> tuple[list[list[int]], float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=False)
        return [output.completions[0].token_ids for output in outputs], time.perf_counter() - start

    (tokens, seconds), rows = profiled(llm.engine.runner, run)
    assert tokens == [output.completions[0].token_ids for output in expected]
    places = {row.where: row for row in rows if not row.operator}
    assert tuple(places) == PLACES
    assert sum(row.seconds for row in places.values()) == pytest.approx(seconds, rel=0.1)
    calls = {(row.where, row.operator): row.calls for row in rows}
    assert calls["attention", PYTHON] == calls["cache write", PYTHON] == 6 * 3, "6 steps of 3 layers"
    assert calls["sampling", PYTHON] == calls["Python and compiled code in the model", PYTHON] == 6
    assert places["matrix products"].seconds > 0


def test_only_a_processor_can_be_profiled(tiny: Path) -> None:
    llm = LLM(tiny, progress=False, max_batch_total_tokens=4096)
    llm.engine.runner.device = torch.device("meta")
    with pytest.raises(ValueError, match="this model runs on meta"):
        profiled(llm.engine.runner, lambda: None)
