"""`octavo conformance NAME`: what it prints, writes and returns."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as xml

import pytest
import torch
from rich.console import Console

from octavo.attention.contract import AttentionBackend, AttentionSpec, Capabilities
from octavo.attention.device import CPU, Memory
from octavo.bench import device_time, kernels
from octavo.bench.batches import Batch
from octavo.conformance.junit import junit
from octavo.conformance.registry import CASES, trials
from octavo.conformance.runner import play, run
from octavo.hooks import hookimpl
from octavo.kv.layout import TOKEN_MAJOR, KVCacheLayout
from octavo.plugins import Plugins
from octavo_cpu.backend import FlashDecodingBackend
from octavo_reference.backend import ReferenceBackend
from tests.conformance.faults import FAULTS, Narrow
from tests.conformance.minimal import FLOATS
from tests.conformance.test_backends import FlatBackend


class Correct(Narrow):
    name = "correct"


class Broken(FAULTS["soft cap dropped"][0]):  # type: ignore[misc]
    name = "broken"


class Wrong(FAULTS["scale dropped"][0]):  # type: ignore[misc]
    name = "wrong"


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    return [Correct, Broken, Wrong, ReferenceBackend]


@pytest.fixture(scope="module")
def installed() -> Plugins:
    return Plugins([EntryPoint("third", f"{__name__}", "octavo")])


def conformance(installed: Plugins, name: str, **options: Any) -> SimpleNamespace:
    """Exit status and text of one run."""
    text = StringIO()
    console = Console(file=text, width=120)
    status = run(name, device="cpu", installed=installed, console=console, **options)
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
    assert failed[0]["repeat"].startswith("octavo conformance broken --device cpu --case 'features[")
    trial = f"{failed[0]['case']}[{failed[0]['configuration']}]"
    again = conformance(installed, "broken", only=trial, json_path=tmp_path / "again.json")
    assert again.status == 1
    (row,) = json.loads((tmp_path / "again.json").read_text())["rows"]
    assert row | {"seconds": 0} == failed[0] | {"seconds": 0}


def test_each_failure_is_told_with_its_seed(installed: Plugins, tmp_path: Path) -> None:
    ran = conformance(installed, "broken", only="features", seed=5, junit_path=tmp_path / "report.xml")
    told = [line for line in ran.text.splitlines() if line.startswith("features[")]
    assert len(told) == 3
    assert all("], seed 5: layer 0, row 0" in line and "it is attention without the soft cap" in line for line in told)
    cases = xml.parse(tmp_path / "report.xml").getroot().findall("./testsuite/testcase")
    assert len(cases) == len(trials(Broken, CPU(), "features"))
    failures = {case.get("name"): case.find("failure") for case in cases}
    failed = {name: failure for name, failure in failures.items() if failure is not None}
    assert len(failed) == 3
    for name, failure in failed.items():
        assert failure.text == f"octavo conformance broken --device cpu --case '{name}' --seed 5"
        assert failure.text in ran.text
        assert str(failure.get("message")).startswith("layer 0, row 0")


def test_of_a_case_that_fails_often_the_first_are_told(installed: Plugins) -> None:
    ran = conformance(installed, "wrong", only="pairs")
    assert len([line for line in ran.text.splitlines() if line.startswith("pairs[")]) == 3
    more = len(trials(Wrong, CPU(), "pairs")) - 3
    assert f"  and {more} more of this case: octavo conformance wrong --device cpu --case pairs --seed 0" in ran.text


def test_what_is_no_text_is_kept_out_of_xml(tmp_path: Path) -> None:
    class Raising(Narrow):
        def attend(self, *_: object) -> torch.Tensor:
            raise RuntimeError("\x1b[31m<kernel>\x00 & more")

    report = xml.fromstring(junit(play(Raising, CPU(), only="zero-query")))
    (error,) = report.findall("./testsuite/testcase/error")
    assert str(error.get("message")).startswith("RuntimeError:  [31m<kernel>  & more (test_runner.py:")
    assert report[0].get("errors") == "1"


def test_a_remark_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache of 2^31 elements does not fit, the report says so."""
    monkeypatch.setattr(CPU, "memory", lambda self: Memory(2**20, 2**30))
    text = StringIO()
    report = play(Narrow, CPU(), only="high-blocks")
    report.print(Console(file=text, width=120))
    assert text.getvalue().count(": memory allows no more") == len(report.outcomes)
    assert all("memory allows no more" in row["remark"] for row in report.to_dict()["rows"])


def test_speed_is_measured_of_what_is_right(
    installed: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SMALL", [Batch.decodes(2, 40), Batch.prompts(1, 8)])
    monkeypatch.setattr(device_time, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(device_time, "FLUSHED_BYTES", 1 << 10)
    ran = conformance(installed, "correct", only="dtypes", bench=True, json_path=tmp_path / "report.json")
    assert ran.status == 0
    assert "speed: heads 32/8 of 24, cache float32, blocks of 16" in ran.text
    decode, prompt = json.loads((tmp_path / "report.json").read_text())["speed"]
    for row in (decode, prompt):
        assert (row["backend"], row["times_the_reference"] > 0) == ("test/correct", True)
    assert decode["bytes_per_second"] * decode["attend_seconds"] == pytest.approx(2 * 2 * 40 * 8 * 24 * 4)
    assert "floor_percent" in decode
    broken = conformance(installed, "broken", only="features", bench=True, json_path=tmp_path / "broken.json")
    assert "speed" not in broken.text
    assert json.loads((tmp_path / "broken.json").read_text())["speed"] == []


def test_what_cannot_be_run(installed: Plugins) -> None:
    unknown = conformance(installed, "corect")
    assert (unknown.status, "did you mean correct" in unknown.text) == (2, True)
    no_case = conformance(installed, "correct", only="decoding")
    assert (no_case.status, "decoding" in no_case.text) == (2, True)


def test_what_is_not_declared_is_shown() -> None:
    class Plain(Narrow):
        capabilities = Capabilities(
            dtypes=(torch.float32,), kv_dtypes=(torch.float32,), head_sizes=(16,), block_sizes=(16,)
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
    assert outcome.result == "error"
    assert re.fullmatch(r"RuntimeError: no kernel image \(test_runner.py:\d+ in attend\)", outcome.reason)


@pytest.mark.parametrize("backend", [Narrow, ReferenceBackend, FlashDecodingBackend, FlatBackend])
def test_a_name_is_of_one_trial(backend: type[AttentionBackend]) -> None:
    """So that the command that repeats one repeats no other."""
    names = Counter(map(str, trials(backend, CPU())))
    assert names.total() == len(names)


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


@pytest.mark.parametrize(
    ("wanted", "way_out"),
    [("decod", "prefill, decode, mixed"), ("decode[fp32-4/2x32-b16-nann]", "perhaps decode[")],
)
def test_a_case_that_there_is_not_is_told_with_those_that_there_are(wanted: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'is called "{wanted}": {way_out}')):
        play(Narrow, CPU(), only=wanted)
