"""octavo bench kernels: what is counted is what attention does, what is timed is right, and all are given the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo.attention.select import Selection
from octavo.bench import device_time, kernels
from octavo.bench.batches import GRID, SMALL, Batch, chosen
from octavo.bench.cli import app
from octavo.bench.device_time import in_turns
from octavo.bench.inputs import Inputs, shuffled
from octavo.bench.kernels import Options, run
from octavo.bench.report import Report
from octavo.conformance.truth import Fault
from octavo.kv.layout import PACKED, TOKEN_MAJOR, LayoutType
from octavo_reference.backend import ReferenceBackend
from tests.bench.test_report import units_are_named

SPEC = AttentionSpec(
    layers=1, heads=4, kv_heads=2, head_size=8, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32
)  # fmt: skip
WHERE = torch.device("cpu")


@given(rows=st.integers(1, 3), length=st.integers(2, 9), behind=st.integers(0, 9))
def test_operations_are_those_of_the_pairs_that_see_each_other(rows: int, length: int, behind: int) -> None:
    measures = kernels._measures(SPEC, Batch.prompts(rows, length, behind), taken=2.0, ceiling=1.0)
    pairs = sum(key <= behind + query for _ in range(rows) for query in range(length) for key in range(behind + length))
    assert measures == {"attend_seconds": 2.0, "operations_per_second": 4 * pairs * 4 * 8 / 2}


def test_bytes_are_those_of_keys_and_values() -> None:
    measures = kernels._measures(SPEC, Batch.decodes(3, 10), taken=0.5, ceiling=10_000.0)
    tensors = [torch.empty(10, 2, 8) for _ in range(3 * 2)]
    size = sum(tensor.nbytes for tensor in tensors)
    assert measures == {
        "attend_seconds": 0.5, "bytes_per_second": size / 0.5, "floor_percent": 100 * size / 10_000 / 0.5,
    }  # fmt: skip


@given(blocks=st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_each_row_has_blocks_of_its_own(blocks: list[int]) -> None:
    table = shuffled(blocks).tolist()
    used = [block for row, count in zip(table, blocks, strict=True) for block in row[:count]]
    assert sorted(used) == list(range(1, sum(blocks) + 1))


def test_the_grid_has_every_kind_and_each_name_once() -> None:
    names = [batch.name for batch in GRID]
    assert len({*names}) == len(names)
    assert {batch.kind for batch in GRID} == {batch.kind for batch in SMALL} == {"decode", "prefill", "mixed"}
    mixed = next(batch for batch in GRID if batch.name == "1 x 512 behind 8192 with 64 decodes of 2048")
    assert (mixed.contexts, mixed.new) == ((2048,) * 64 + (8704,), (1,) * 64 + (512,))


def test_batches_are_chosen_by_name_and_kind() -> None:
    assert chosen(SMALL, [], None) == SMALL
    assert [batch.name for batch in chosen(SMALL, ["1X8192", "4 x 4096"], None)] == ["1 x 8192", "4 x 4096"]
    assert [batch.name for batch in chosen(SMALL, ["1 x 8192", "4 x 4096"], "prefill")] == ["4 x 4096"]
    assert {batch.kind for batch in chosen(GRID, [], "mixed")} == {"mixed"}
    with pytest.raises(ValueError, match=r'there is no batch "1 x 7": 1 x 1024, 1 x 8192, '):
        chosen(SMALL, ["1 x 7"], None)
    with pytest.raises(ValueError, match=r"none of these batches is both \(decode, prefill, mixed\): 1 x 8192"):
        chosen(SMALL, ["1 x 8192"], "both")


# What backends are given.


class Spy(ReferenceBackend):
    """Keeps what it is given."""

    name = "spy"
    given: ClassVar[dict[str, Any]] = {}

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        self.given["batch"] = batch
        return super().plan(batch, bucket)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: Any, layer: int) -> Tensor:
        self.given.update(key=key, value=value, cache=cache)
        return super().attend(query, key, value, cache, plan, layer)


@pytest.mark.parametrize("layout", [TOKEN_MAJOR, PACKED])
@pytest.mark.parametrize("block_size", [4, 7])
def test_every_layout_holds_the_same_tokens(layout: LayoutType, block_size: int) -> None:
    """By the block table, token by token; the step's own are the last, and stand at their slots too."""
    batch = Batch("mixed", (9, 1, 12), (1, 1, 5))
    inputs = Inputs(SPEC, batch, WHERE)
    backend = Spy(SPEC, block_size, CPU())
    backend.layout = layout(SPEC, block_size)
    inputs.attending(backend)()
    step, start, first = Spy.given["batch"], 0, 0
    for row, (context, new) in enumerate(zip(batch.contexts, batch.new, strict=True)):
        places = [int(step.block_table[row, at // block_size]) * block_size + at % block_size for at in range(context)]
        held = backend.layout.read(Spy.given["cache"], 0, torch.tensor(places))
        for tensor, drawn, name in zip(held, (inputs.keys, inputs.values), ("key", "value"), strict=True):
            assert torch.equal(tensor, drawn[start : start + context])
            assert torch.equal(tensor[-new:], Spy.given[name][first : first + new])
        assert step.slots[first : first + new].tolist() == places[-new:]
        start, first = start + context, first + new
    assert (step.query_starts.tolist(), step.context_lengths.tolist()) == ([0, 1, 2, 7], [9, 1, 12])
    assert (step.decodes, step.max_query, step.max_context) == (2, 5, 12)
    assert torch.equal(Inputs(SPEC, batch, WHERE).keys, inputs.keys)


# What is timed.


class Wrong(ReferenceBackend):
    """Answers wrongly in one of several ways."""

    name = "wrong"
    fault: ClassVar[Callable[[Tensor], Tensor]]

    def attend(self, *given: Any) -> Tensor:
        return type(self).fault(super().attend(*given))


def last_token(answer: Tensor) -> Tensor:
    answer[-1, -1] *= 1.1
    return answer


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "it is wrong": lambda answer: answer.flip(1),
    "it is wrong: error": last_token,
    "it is not finite": lambda answer: answer.index_fill(0, torch.tensor([1]), torch.nan),
    "the output's dtype is": lambda answer: answer.double(),
    "out of resources": lambda answer: (_ for _ in ()).throw(RuntimeError("out of resources")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_not_timed(fault: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "fault", staticmethod(FAULTS[fault]), raising=False)
    contenders = [
        (Selection(kind, "cpu", 16, (), (), kind.capabilities), kind(SPEC, 16, CPU()))
        for kind in (Wrong, ReferenceBackend)
    ]
    inputs = Inputs(SPEC, Batch("mixed", (20, 9, 40), (1, 1, 30)), WHERE)
    wrong, right = kernels._measured(contenders, inputs, CPU(), 1, 1.0)
    assert fault in str(wrong["fault"])
    assert "attend_seconds" not in wrong
    assert isinstance(right["attend_seconds"], float)
    assert isinstance(right["error_ratio"], float)
    assert 0 < right["error_ratio"] < 1e-5


class Replays(CPU):
    """Its graphs do not compute what they captured."""

    captures = True
    answers: ClassVar[list[Tensor]] = []

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        run()
        answer = self.answers[-1]

        def replay() -> None:
            answer.zero_()

        return replay


class Captured(ReferenceBackend):
    capabilities = replace(ReferenceBackend.capabilities, graphs="decode")

    def attend(self, *given: Any) -> Tensor:
        Replays.answers.append(super().attend(*given))
        return Replays.answers[-1]


def test_what_is_checked_is_what_a_graph_replays(quick: None) -> None:
    inputs = Inputs(SPEC, Batch.decodes(2, 20), WHERE)
    with pytest.raises(Fault, match="it is wrong"):
        kernels._checked(inputs, Captured(SPEC, 16, CPU()), Replays())
    kernels._checked(inputs, Captured(SPEC, 16, CPU()), CPU())


def test_what_a_graph_reads_stays(quick: None) -> None:
    """Until it is replayed for the last time: else another backend's cache would take its place."""
    backend, inputs = Captured(SPEC, 16, CPU()), Inputs(SPEC, Batch.decodes(2, 20), WHERE)
    attending = inputs.attending(backend)
    kept = weakref.ref(attending)
    replay = device_time.prepared(Replays(), attending)
    del attending
    assert kept() is not None
    del replay
    assert kept() is None


def test_all_are_timed_in_turns(quick: None) -> None:
    turns: list[str] = []
    taken = in_turns(CPU(), [lambda: turns.append("a"), lambda: turns.append("b")], 3)
    assert turns == ["a", "b"] * 3
    assert len(taken) == 2
    assert device_time._medians([[1.0, 5.0], [9.0, 6.0], [2.0, 4.0]]) == [2.0, 5.0]


# The whole of it.


def options(**changed: Any) -> Options:
    plain: dict[str, Any] = {
        "attention": ["any/reference"], "device": "cpu", "heads": ["4/2"], "head_size": 8, "block_sizes": [16],
        "repeats": 1,
    }  # fmt: skip
    return Options(**(plain | changed))


def test_every_backend_batch_and_shape_has_a_row(quick: None) -> None:
    told: list[str] = []
    report = run(
        options(
            attention=["any/reference", "cpu/flashdecoding"], heads=["4/2", "2/2"], kv_dtypes=["bfloat16", "float32"],
            block_sizes=[8, 16], batches=["8 x 512", "2 x 128"],
        ),
        told.append,
    )  # fmt: skip
    keys = ("heads", "cache", "batch", "backend", "block_size_tokens")
    found = [tuple(row[key] for key in keys) for row in report.rows]
    own = [(backend, size) for backend in ("any/reference", "cpu/flashdecoding") for size in (8, 16)]
    assert found == [
        (heads, cache, batch, *one)
        for heads in ("4/2 of 8", "2/2 of 8") for cache in ("bfloat16", "float32") for batch in ("8 x 512", "2 x 128")
        for one in own
    ]  # fmt: skip
    assert len(told) == 8
    assert units_are_named(report.rows)
    assert all(isinstance(row["error_ratio"], float) for row in report.rows)
    assert "fault" not in {key for row in report.rows for key in row}


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"dtypes": ["float7"]}, "float7 is no dtype"), ({"heads": ["8"]}, "heads 8: write query heads and key heads")],
)
def test_what_cannot_be_read_is_named(quick: None, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(options(**changed), lambda _: None)


def test_the_command(quick: None, tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("k.json", "again.json", "k.svg")}
    shape = ("--heads", "4/2", "--head-size", "8", "--only", "decode", "--device", "cpu", "--attention", "reference")
    runner = CliRunner()
    result = runner.invoke(
        app,
        ["kernels", *shape, "--batch", "1 x 1024", "--batch", "2 x 128", "--repeats", "1", "--json", files["k.json"]],
    )
    assert (result.exit_code, "1 x 1024" in result.stdout) == (0, True)
    assert [row["batch"] for row in Report.read(tmp_path / "k.json").rows] == ["1 x 1024"]
    again = ["kernels", "--from", files["k.json"], "--json", files["again.json"], "--plot", files["k.svg"]]
    assert runner.invoke(app, again).exit_code == 0
    assert Report.read(tmp_path / "again.json") == Report.read(tmp_path / "k.json")
    assert (tmp_path / "k.svg").read_bytes().startswith(b"<?xml")
    refused = runner.invoke(app, [*again, "--tune"])
    assert "a plot is of times" in str(refused.exception)


def test_faults_are_told_when_all_is_shown(quick: None, tmp_path: Path) -> None:
    report = run(options(batches=["2 x 128"]), lambda _: None)
    report.rows[0]["fault"] = "Fault: it is wrong"
    report.write(tmp_path / "k.json")
    result = CliRunner().invoke(app, ["kernels", "--from", str(tmp_path / "k.json")])
    assert result.exit_code == 1
    assert "octavo: any/reference, 2 x 128: Fault: it is wrong" in result.stderr
    assert "fails" in result.stdout
