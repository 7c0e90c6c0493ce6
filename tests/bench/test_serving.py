"""`octavo bench serving`: rows worked out by hand, the command as called, and a server that is too small."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.bench import server_process
from octavo.bench.cli import app
from octavo.bench.exchange import Exchange
from octavo.bench.job import EngineFailed, Measurement
from octavo.bench.latency import Objectives
from octavo.bench.report import Report
from octavo.bench.serving import Options, Turn, rows
from octavo.bench.steps import StepTime
from octavo.bench.throughput import Load
from octavo.bench.traffic import Answer, Traced
from octavo.bench.workload import Range
from tests.bench.test_report import units_are_named
from tests.server.live import Live, live

EXCHANGES = [Exchange([1], 4), Exchange([2], 4)]
SMALL = ["--no-sharegpt", "--input-min", "5", "--input-max", "9", "--repeats", "1"]


def bench(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["serving", *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def options(**changes: Any) -> Options:
    return Options(model="m", name="m", load=Load(2, Range(1, 1), Range(4, 4)), streams=2, **changes)


def turn(seconds: float, alone: float, step: float, failed: bool = False) -> Turn:
    """Two answers of four tokens, a text each quarter of the time; the engine alone took `alone` seconds."""
    times = [seconds * part / 4 for part in (1, 2, 3, 4)]
    answered = Answer(sent=0.0, texts=times, ended=seconds, tokens=4)
    refused = Answer(sent=0.0, texts=[], ended=0.1, tokens=0, error="status 429: full")
    measured = Measurement(
        seconds=alone, start_seconds=1.0, answers=[], steps=4, backend="b", device="cpu", threads=2,
        instructions="AVX2", peak_memory_bytes=1,
    )  # fmt: skip
    return Turn(
        Traced(answers=[answered, refused if failed else answered], cpu_seconds=0.08), 0.4, [StepTime(step, 0, 2)] * 3,
        measured, [StepTime(0.1, 0, 2)] * 3,
    )  # fmt: skip


def test_the_ratio_is_taken_turn_by_turn() -> None:
    """8 tokens: 4, 2 and 1 a second through the server; 8, 2 and 4 from the engine alone."""
    turns = [turn(2.0, 1.0, 0.2), turn(4.0, 4.0, 0.1), turn(8.0, 2.0, 0.15)]
    served, alone = rows(options(objectives=Objectives.read("ttft=1")), turns, EXCHANGES)
    assert units_are_named([served, alone])
    assert (served["engine"], alone["engine"]) == ("octavo serve", "octavo.LLM")
    name = "output_tokens_per_second"
    ends = ("", "_min", "_max")
    assert [served[f"{name}{end}"] for end in ends] == [2.0, 1.0, 4.0]
    assert [alone[f"{name}{end}"] for end in ends] == [4.0, 2.0, 8.0]
    assert [served[f"{name}_ratio{end}"] for end in ends] == [0.5, 0.25, 1.0]
    assert [served[f"step_seconds_ratio{end}"] for end in ends] == [1.5, 1.0, 2.0]
    assert served["failed_requests"] == 0
    assert (served["ttft_p50_seconds"], served["itl_p90_seconds"]) == (1.0, 2.0)
    assert (served["good_percent"], served["good_requests_per_second"]) == (66.67, 0.286), "4 of 6, in 14 seconds"
    assert served["server_cpu_per_token_seconds"] == 0.05, "1.2 seconds for 24 tokens"
    assert served["clients_cpu_per_token_seconds"] == 0.01


def test_failures_count_against_it() -> None:
    """Half of the tokens are missing: so is half of the rate. A request that fails is never a good one."""
    served, _ = rows(options(objectives=Objectives.read("e2e=99")), [turn(2.0, 1.0, 0.1, failed=True)], EXCHANGES)
    assert (served["output_tokens_per_second"], served["output_tokens_per_second_ratio"]) == (2.0, 0.25)
    assert (served["failed_requests"], served["good_percent"], served["good_requests_per_second"]) == (1, 50.0, 0.5)
    assert served["answered_requests_per_second"] == 0.5


def test_the_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """octavo serve and octavo.LLM on the same requests, each in a process of its own."""
    monkeypatch.setenv("COMPILE", "0")
    monkeypatch.setenv("MAX_BATCH_TOTAL_TOKENS", "4096")
    monkeypatch.setenv("API_KEY", "secret")
    files = {name: tmp_path / name for name in ("s.json", "steps.json", "plot.svg")}
    result = bench(
        "--model", str(tiny), *SMALL, "--streams", "2", "--requests", "4", "--output-min", "6", "--output-max", "9",
        "--threads", "1", "--attention", "reference", "--slo", "ttft=60,tpot=60", "--json", str(files["s.json"]),
        "--steps", str(files["steps.json"]), "--plot", str(files["plot.svg"]),
    )  # fmt: skip
    report, steps = Report.read(files["s.json"]), Report.read(files["steps.json"])
    served, alone = report.rows
    assert units_are_named(report.rows)
    assert units_are_named(steps.rows)
    assert (served["engine"], served["failed_requests"], served["good_percent"]) == ("octavo serve", 0, 100.0)
    assert (alone["engine"], report.workload["streams"], report.workload["threads"]) == ("octavo.LLM", 2, 1)
    assert "failures" not in {name for name, value in report.workload.items() if value is not None}
    for measure in ("ttft", "tpot", "itl", "e2e"):
        low, middle, high = (served[f"{measure}_p{rank}_seconds"] for rank in (50, 90, 99))
        assert isinstance(low, float)
        assert isinstance(middle, float)
        assert isinstance(high, float)
        assert 0 < low <= middle <= high
    sizes = {row["running_requests"] for row in steps.rows}
    assert sizes <= {1, 2}
    assert 2 in sizes
    assert files["plot.svg"].exists()
    assert "octavo.LLM ms" in result.stdout


@pytest.fixture(scope="module")
def one_place(tiny: Path) -> Iterator[Live]:
    """A server that takes one request at a time."""
    with live(tiny, max_concurrent_requests=1, block_size=4) as server:
        yield server


def test_no_turn_finds_what_an_earlier_one_left(tiny: Path, one_place: Live) -> None:
    """The engine, which says how many prompt tokens it found in its cache, goes on from turn to turn."""
    bench(
        "--model", str(tiny), *SMALL, "--url", one_place.url, "--streams", "1", "--requests", "2", "--repeats", "2",
        "--output-min", "1", "--output-max", "2",
    )  # fmt: skip
    stats = one_place.run(one_place.service.engine.stats())
    assert stats.queried_tokens >= 2 * 2 * 2 * 5
    assert stats.hit_tokens == 0


def test_a_server_that_turns_requests_away(tiny: Path, tmp_path: Path, one_place: Live) -> None:
    """It has one place, and eight requests come within a moment, none of which is short."""
    bench(
        "--model", str(tiny), *SMALL, "--url", one_place.url, "--rate", "10000", "--requests", "8",
        "--output-min", "100", "--output-max", "100", "--json", str(tmp_path / "s.json"),
    )  # fmt: skip
    report = Report.read(tmp_path / "s.json")
    (row,) = report.rows
    failed = row["failed_requests"]
    assert isinstance(failed, int)
    assert 0 < failed < 8
    assert str(report.workload["failures"]).startswith(f"{failed} of status 429: ")
    assert row["engine"] == one_place.url
    assert row["server_cpu_per_token_seconds"] is None


def test_a_server_that_does_not_start_says_why(tiny: Path) -> None:
    with (
        pytest.raises(EngineFailed, match=r"(?s)octavo serve did not start:.*block_size is '0'"),
        server_process.octavo_serve([str(tiny), "--block-size=0"]),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "2", "--streams", "3"], "give one of them"),
        (["--rate", "2", "--peer"], "in a closed loop"),
        (["--url", "http://127.0.0.1:1", "--peer"], "in a closed loop"),
        (["--slo", "speed=3"], "slo has 'speed=3'"),
    ],
)
def test_bad_input_is_told(tiny: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench("--model", str(tiny), *arguments)


def test_no_server_is_there(tiny: Path) -> None:
    with pytest.raises(EngineFailed, match=r"http://127\.0\.0\.1:1/v1/models: .*refused"):
        bench("--model", str(tiny), *SMALL, "--requests", "1", "--url", "http://127.0.0.1:1")
