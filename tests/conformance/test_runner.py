"""`octavo conformance NAME`: what it prints, writes and returns."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from octavo.attention.contract import AttentionBackend, AttentionSpec
from octavo.attention.device import CPU
from octavo.conformance.registry import CASES, trials
from octavo.conformance.runner import play, run
from octavo.hooks import hookimpl
from octavo.kv.layout import TOKEN_MAJOR, KVCacheLayout
from octavo.plugins import Plugins
from tests.conformance.faults import FAULTS, Narrow
from tests.conformance.minimal import FLOATS


class Correct(Narrow):
    name = "correct"


class Broken(FAULTS["soft cap dropped"][0]):  # type: ignore[misc]
    name = "broken"


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    return [Correct, Broken]


@pytest.fixture(scope="module")
def installed() -> Plugins:
    return Plugins([EntryPoint("third", f"{__name__}", "octavo")])


def conformance(
    installed: Plugins, name: str, *, only: str | None = None, json_path: Path | None = None
) -> SimpleNamespace:
    """Exit status and text of one run."""
    text = StringIO()
    console = Console(file=text, width=120)
    status = run(name, device="cpu", only=only, json_path=json_path, installed=installed, console=console)
    return SimpleNamespace(status=status, text=text.getvalue())


def test_a_correct_backend(installed: Plugins, tmp_path: Path) -> None:
    ran = conformance(installed, "correct", json_path=tmp_path / "report.json")
    assert ran.status == 0
    assert all(name in ran.text for name in CASES)
    played = trials(Correct, CPU())
    assert len({trial.case for trial in played}) == len(CASES) - 1  # it declares no fp8 cache
    assert f"all of {len(played)} trials of {len(CASES) - 1} cases" in ran.text
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["conformance"], report["device"], report["passed"]) == ("test/correct", "cpu", True)
    assert {row["case"] for row in report["rows"]} == set(CASES) - {"fp8-scales"}
    assert all(row["relative_error"] <= row["relative_error_limit"] for row in report["rows"])


def test_a_failure_can_be_repeated(installed: Plugins, tmp_path: Path) -> None:
    first = conformance(installed, "broken", only="features", json_path=tmp_path / "first.json")
    assert first.status == 1
    failed = [row for row in json.loads((tmp_path / "first.json").read_text())["rows"] if row["result"] == "failed"]
    assert len(failed) == 3
    assert failed[0]["repeat"] in first.text
    assert failed[0]["repeat"].startswith("octavo conformance broken --device cpu --only 'features[")
    trial = f"{failed[0]['case']}[{failed[0]['configuration']}]"
    again = conformance(installed, "broken", only=trial, json_path=tmp_path / "again.json")
    assert again.status == 1
    (row,) = json.loads((tmp_path / "again.json").read_text())["rows"]
    assert row | {"seconds": 0} == failed[0] | {"seconds": 0}


def test_what_cannot_be_run(installed: Plugins) -> None:
    unknown = conformance(installed, "corect")
    assert (unknown.status, "did you mean correct" in unknown.text) == (2, True)
    no_case = conformance(installed, "correct", only="decoding")
    assert (no_case.status, "decoding" in no_case.text) == (2, True)


def test_what_is_not_declared_is_shown() -> None:
    class Plain(Narrow):
        capabilities = replace(
            Narrow.capabilities, features=frozenset(), graphs="none", prefix_caching=False, batch_invariant=False
        )

    text = StringIO()
    play(Plain, CPU()).print(Console(file=text, width=120))
    lines = {line.split()[1]: line for line in text.getvalue().splitlines() if line.startswith("│")}
    undeclared = {case for case, line in lines.items() if "not declared" in line}
    assert undeclared == {
        "resumed-prefill",
        "prefill-in-chunks",
        "features",
        "batch-invariant",
        "fp8-scales",
        "replay-decode",
        "replay-mixed",
    }


def test_what_raises_is_an_outcome() -> None:
    class Raising(Narrow):
        def attend(self, *_: object) -> torch.Tensor:
            raise RuntimeError("no kernel image")

    (trial,) = trials(Raising, CPU(), "zero-query")
    outcome = trial.run()
    assert (outcome.result, outcome.reason) == ("error", "RuntimeError: no kernel image")


def test_the_same_seed_gives_the_same_numbers() -> None:
    def numbers(seed: int) -> torch.Tensor:
        (trial,) = trials(Narrow, CPU(), "layers", seed)
        stage = trial.stage()
        return stage.step([(stage.row(3), 2)]).query

    assert torch.equal(numbers(0), numbers(0))
    assert not torch.equal(numbers(0), numbers(1))


class Pairs(Narrow):
    """Takes the other float's cache, but for one pair; and says no to a size that it declares."""

    name = "pairs"
    capabilities = replace(Narrow.capabilities, dtypes=FLOATS, kv_dtypes=FLOATS)

    @staticmethod
    def layout_type(spec: AttentionSpec, block_size: int) -> KVCacheLayout:
        if (spec.dtype, spec.kv_dtype) == (torch.float16, torch.bfloat16):
            raise ValueError("not these two")
        if spec.dtype == spec.kv_dtype == torch.bfloat16:
            raise ValueError("declared, and refused")
        return TOKEN_MAJOR(spec, block_size)


def test_only_a_pair_of_dtypes_may_be_refused_by_the_layout() -> None:
    played = trials(Pairs, CPU(), "dtypes")
    tried = {(trial.configuration.dtype, trial.configuration.kv_dtype) for trial in played}
    assert tried == {(one, other) for one in FLOATS for other in FLOATS} - {(torch.float16, torch.bfloat16)}
    outcomes = {str(trial): trial.run().result for trial in played if trial.configuration.dtype == torch.bfloat16}
    assert [name for name, result in outcomes.items() if result == "error"] == [
        name for name in outcomes if "cache-" not in name
    ]
