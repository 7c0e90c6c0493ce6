"""octavo and its peer on the same requests: the same tokens, numbers worked out by hand, the commands as called."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from octavo.bench import throughput, worker
from octavo.bench.cli import app
from octavo.bench.exchange import Exchange
from octavo.bench.job import EngineFailed, Job, Measurement, ProfileRow, measure
from octavo.bench.report import Report
from octavo.bench.throughput import OCTAVO, PEER, Engine, Load, Turns, profile_rows, throughput_rows
from octavo.bench.workload import Range, Uniform
from octavo.models.load import load_random
from tests import checkpoints
from tests.bench.test_report import units_are_named
from tests.checkpoints import VOCABULARY

EXCHANGES = [Exchange(list(b"a book"), 6), Exchange(list(b"a longer book, of many leaves"), 3)]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def job(model: Path, engine: str = "octavo", attention: str = "reference") -> Job:
    return Job(engine=engine, model=str(model), dtype="float32", attention=attention, block_size=4, exchanges=EXCHANGES)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """Measure without a process of its own; gives the jobs."""
    jobs: list[Job] = []

    def measured(job: Job, threads: int | None = None) -> Measurement:
        jobs.append(job)
        return worker.run(job)

    monkeypatch.setattr(throughput, "measure", measured)
    yield jobs
    torch.set_num_threads(1)


def test_both_engines_give_the_same_tokens(tiny: Path) -> None:
    """In processes of their own, as they are measured."""
    ours, theirs = measure(job(tiny), threads=1), measure(job(tiny, "transformers"), threads=1)
    assert [len(answer) for answer in ours.answers] == [6, 3]
    assert ours.answers == theirs.answers
    assert (ours.steps, ours.discarded_tokens, ours.cached_tokens) == (6, 0, 0), "the warm-up leaves no prefix behind"
    assert (theirs.steps, theirs.discarded_tokens) == (6, 3), "the short answer waits for the long one"
    assert (ours.backend, ours.block_size, theirs.backend) == ("any/reference", 4, "sdpa")
    assert ours.threads == theirs.threads == 1
    assert 0 < ours.seconds < 60
    assert 100e6 < ours.peak_memory_bytes < 8e9


def test_the_peer_attends_as_transformers_prefers(tmp_path: Path) -> None:
    """BLOOM has no `sdpa`."""
    theirs = worker.run(job(checkpoints.make("bloom", tmp_path), "transformers"))
    assert theirs.backend == "eager"
    assert [len(answer) for answer in theirs.answers] == [6, 3]


def test_a_cache_that_is_kept_has_none_of_the_prefixes(tiny: Path) -> None:
    """As a server's has, whose clients bring a salt: the blocks of the timed run are others than the warm-up's."""
    engine = worker.OctavoEngine(replace(job(tiny), keep_cache=True))
    engine.warm_up(EXCHANGES)
    kept = engine.llm.engine.scheduler.kv.stats().cached
    found = engine.generate(EXCHANGES)
    assert (found.cached_tokens, found.answers) == (0, measure(job(tiny), threads=1).answers)
    assert engine.llm.engine.scheduler.kv.stats().cached > kept > 0


def test_a_process_that_fails_says_why(tiny: Path) -> None:
    with pytest.raises(EngineFailed, match=r'^octavo: attention referense: there is no backend "referense"'):
        measure(job(tiny, attention="referense"))


def measurement(seconds: float, answers: list[list[int]], discarded: int = 0) -> Measurement:
    return Measurement(
        seconds=seconds, start_seconds=4 * seconds, answers=answers, steps=6, backend="b", device="cpu", threads=2,
        instructions="AVX2", peak_memory_bytes=10_400_000 + round(seconds * 1e6), discarded_tokens=discarded,
    )  # fmt: skip


def test_the_ratio_is_taken_turn_by_turn() -> None:
    """9 output tokens: the peer's 3, 9 and 4.5 a second against 9, 18 and 4.5."""
    same, other = [[1] * 6, [2] * 3], [[1] * 6, [2, 2, 3]]
    turns = Turns(
        Load(2, Range(1, 9), Range(3, 6)),
        {
            Engine(PEER): [measurement(3.0, other, discarded=3), measurement(1.0, other), measurement(2.0, other)],
            Engine(OCTAVO): [measurement(1.0, same), measurement(0.5, same), measurement(2.0, same)],
        },
    )
    theirs, ours = throughput_rows(turns, EXCHANGES)
    assert units_are_named([theirs, ours])
    assert (ours["engine"], ours["requests"], ours["identical_requests"]) == ("octavo", 2, 1)
    names = ("output_tokens_per_second", "output_tokens_per_second_ratio")
    assert [[ours[f"{name}{end}"] for end in ("", "_min", "_max")] for name in names] == [[9, 4.5, 18], [2, 1, 3]]
    assert [[theirs[f"{name}{end}"] for end in ("", "_min", "_max")] for name in names] == [[4.5, 3, 9], [1, 1, 1]]
    assert (ours["wall_seconds"], ours["prompt_tokens"], ours["output_tokens"]) == (1.0, 35, 9)
    assert (ours["peak_memory_mb"], theirs["peak_memory_mb"]) == (12, 13)
    assert (ours["start_seconds"], theirs["start_seconds"], theirs["discarded_tokens"]) == (4.0, 8.0, 3)


def test_a_profile_leaves_small_operators_out() -> None:
    rows = [
        ProfileRow("attention", "", 1.0, 4),
        ProfileRow("attention", "a", 0.99, 3),
        ProfileRow("attention", "b", 0.01, 1),
    ]
    measured = Measurement(
        seconds=4.0, start_seconds=1.0, answers=[], steps=1, backend="b", device="cpu", threads=2, instructions="AVX2",
        peak_memory_bytes=1, profile=rows,
    )  # fmt: skip
    shown = profile_rows(measured, Load(2, Range(1, 1), Range(1, 1)), seconds=3.0)
    assert units_are_named(shown)
    assert [(row["where"], row["operator"], row["share_percent"]) for row in shown] == [
        ("attention", "", 25.0),
        ("attention", "a", 24.75),
        ("all", "", 100.0),
        ("without the profiler", "", 75.0),
    ]


def test_the_command(tiny: Path, tmp_path: Path, in_process: list[Job]) -> None:
    """Two turns of each engine and a profile, of two requests and of one."""
    result = run(
        "throughput", "--model", str(tiny), "--requests", "2", "--input-min", "5", "--input-max", "9",
        "--output-min", "2", "--output-max", "4", "--repeats", "2", "--no-sharegpt", "--attention", "reference",
        "--single-input", "4", "--single-output", "3",
        "--json", str(tmp_path / "t.json"), "--profile", str(tmp_path / "p.json"),
    )  # fmt: skip
    assert [(job.engine, len(job.exchanges), job.profile) for job in in_process] == [
        (engine, requests, profile)
        for requests in (2, 1)
        for engine, profile in [("transformers", False), ("octavo", False)] * 2 + [("octavo", True)]
    ]
    report, profile = Report.read(tmp_path / "t.json"), Report.read(tmp_path / "p.json")
    assert [(row["engine"], row["requests"]) for row in report.rows] == [
        ("transformers", 2), ("octavo", 2), ("transformers", 1), ("octavo", 1),
    ]  # fmt: skip
    assert [row["identical_requests"] for row in report.rows] == [None, 2, None, 1]
    assert units_are_named(report.rows)
    assert units_are_named(profile.rows)
    assert report.workload["requests"] == "2 of 5 to 9 tokens in, 2 to 4 out; 1 of 4 tokens in, 3 out"
    assert report.workload["prompts"] == "log-normal lengths, random token ids"
    assert {row["where"] for row in profile.rows} >= {"attention", "matrix products", "all"}
    assert [(row["compile"], row["graphs"]) for row in report.rows] == [(None, None), ("off", "none")] * 2
    assert all(isinstance(row["start_seconds"], float) and row["start_seconds"] > 0 for row in report.rows)
    assert not {"gpu", "driver", "triton"} & report.machine.keys(), "a CPU was measured"
    assert "any/reference" in result.stdout
    assert "2 of 2" in result.stdout


def test_each_backend_takes_its_turn(tiny: Path, in_process: list[Job], tmp_path: Path) -> None:
    run(
        "throughput", "--model", str(tiny), "--requests", "1", "--input-max", "64", "--output-min", "2",
        "--output-max", "2", "--no-sharegpt", "--no-single", "--repeats", "2", "--uncompiled",
        "--attention", "reference", "--attention", "cpu/flashdecoding",
        "--json", str(tmp_path / "t.json"), "--profile", str(tmp_path / "p.json"),
    )  # fmt: skip
    ours = [("octavo", name, off) for name in ("reference", "cpu/flashdecoding") for off in (None, False)]
    turn = [("transformers", None, None), *ours]
    taken = [(job.engine, job.attention, job.compile) for job in in_process]
    assert taken == [*turn, *turn, ours[0]], "and the profile is the first backend's"
    report = Report.read(tmp_path / "t.json")
    assert [(row["engine"], row["backend"]) for row in report.rows] == [
        ("transformers", "sdpa"), ("octavo", "any/reference"), ("octavo, not compiled", "any/reference"),
        ("octavo", "cpu/flashdecoding"), ("octavo, not compiled", "cpu/flashdecoding"),
    ]  # fmt: skip
    assert [row["identical_requests"] for row in report.rows] == [None, 1, 1, 1, 1]
    assert all(row["output_tokens_per_second_ratio"] for row in report.rows)


def test_random_weights_are_the_same_for_both_engines(tiny: Path, tmp_path: Path, in_process: list[Job]) -> None:
    """They are drawn for the configuration alone, whatever the seed of the requests, and nothing is written."""
    config = tmp_path / "config.json"
    config.write_text((tiny / "config.json").read_text())
    run(
        "throughput", "--random-weights", str(config), "--requests", "2", "--input-max", "64", "--output-min", "3",
        "--output-max", "3", "--no-single", "--repeats", "1", "--attention", "reference", "--seed", "5",
        "--json", str(tmp_path / "t.json"),
    )  # fmt: skip
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["workload"]["model"] == f"{config} with random weights"
    assert [(job.model, job.random_weights) for job in in_process] == [(str(config), True)] * 2
    assert [(row["engine"], row["identical_requests"]) for row in found["rows"]] == [
        ("transformers", None), ("octavo", 2),
    ]  # fmt: skip
    prompt = in_process[0].exchanges[0].prompt
    model = load_random(config, dtype=torch.float32, attention="sdpa").model
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].argmax().item()
    again = replace(job(config), random_weights=True, exchanges=[Exchange(prompt, 1)])
    assert worker.run(again).answers == [[first]]


def test_drawn_answers_to_uniform_prompts_have_no_peer(tiny: Path, tmp_path: Path, in_process: list[Job]) -> None:
    run(
        "throughput", "--model", str(tiny), "--requests", "2", "--uniform", "--input-min", "5", "--input-max", "9",
        "--output-min", "3", "--output-max", "3", "--temperature", "0.6", "--max-total-tokens", "24",
        "--no-prefix-caching", "--repeats", "1", "--no-single", "--attention", "reference", "--block-size", "8",
        "--deterministic", "--json", str(tmp_path / "t.json"),
    )  # fmt: skip
    (job,) = in_process
    assert job.deterministic
    assert job.exchanges == Uniform.of(tiny).generation(2, Range(5, 9), Range(3, 3), seed=0)
    assert (job.engine, job.temperature, job.max_total_tokens, job.prefix_caching) == ("octavo", 0.6, 24, False)
    report = Report.read(tmp_path / "t.json")
    shown = ("prompts", "temperature", "max_total_tokens", "prefix_caching", "deterministic")
    assert [report.workload[name] for name in shown] == [
        f"uniform lengths, random token ids up to {VOCABULARY - 1}", 0.6, 24, "off", "on",
    ]  # fmt: skip
    (row,) = report.rows
    assert (row["engine"], row["output_tokens"], row["identical_requests"]) == ("octavo", 6, None)
    assert "output_tokens_per_second_ratio" not in row


def test_the_engine_is_as_the_job_says(tiny: Path) -> None:
    """Two requests with the same prompt, drawn: they differ, and neither finds the other's prefix."""
    wanted = replace(
        job(tiny), exchanges=[Exchange(list(b"a book of leaves"), 20)] * 2, temperature=1.5, prefix_caching=False,
        max_total_tokens=40, deterministic=True,
    )  # fmt: skip
    engine = worker.OctavoEngine(wanted)
    assert engine.llm.engine.scheduler.limits.max_total_tokens == 40
    assert engine.llm.settings.deterministic
    found = engine.generate(wanted.exchanges)
    assert found.answers[0] != found.answers[1]
    assert engine.generate(wanted.exchanges).cached_tokens == 0


@pytest.mark.parametrize(
    ("compiled", "rows", "told"),
    [(True, [1, 2, 4], ("on", "3, for up to 4 requests")), (False, [], ("off", "none")), (None, [], (None, None))],
)
def test_what_the_engine_made_of_the_model_is_told(
    compiled: bool | None, rows: list[int], told: tuple[object, object]
) -> None:
    measured = replace(measurement(1.0, [[1]]), compiled=compiled, captured_rows=rows)
    (row,) = throughput_rows(Turns(Load(1, Range(1, 9), Range(3, 6)), {Engine(OCTAVO): [measured]}), EXCHANGES)
    assert (row["compile"], row["graphs"]) == told


def test_waste_as_a_command(tiny: Path, tmp_path: Path) -> None:
    result = run(
        "waste", "--model", str(tiny), "--requests", "40", "--cache-tokens", "4096", "--no-sharegpt",
        "--block-size", "16", "--block-size", "64", "--json", str(tmp_path / "w.json"),
    )  # fmt: skip
    report = Report.read(tmp_path / "w.json")
    assert [(row["reservation"], row["block_size_tokens"]) for row in report.rows] == [
        ("contiguous", None), ("up front", 16), ("octavo", 16), ("up front", 64), ("octavo", 64),
    ]  # fmt: skip
    assert units_are_named(report.rows)
    assert report.workload["lengths"] == "log-normal lengths, random token ids"
    assert "contiguous" in result.stdout


def test_table_and_page(tmp_path: Path) -> None:
    turns = Turns(Load(2, Range(1, 9), Range(3, 6)), {Engine(OCTAVO): [measurement(1.0, [[1]])]})
    row = throughput_rows(turns, EXCHANGES)
    report = Report(bench="throughput", workload={"model": "m"}, rows=row)
    report.write(tmp_path / "t.json")
    assert run("table", str(tmp_path / "t.json")).stdout.strip() == report.markdown()
    page = tmp_path / "index.md"
    page.write_text("<!-- table: t.json -->\n<!-- end -->\n")
    run("page", str(page))
    assert report.markdown() in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--dtype", "float8"], "dtype is float8: give one of float32"),
        (["throughput", "--input-min", "9", "--input-max", "5"], "from 9 to 5"),
        (["throughput", "--peer", "--temperature", "0.5"], "temperature is 0.5, and the peer is compared token by"),
        (["throughput", "--sharegpt", "--uniform"], "give --sharegpt or --uniform"),
        (["throughput", "--attention", "referense"], 'there is no backend "referense", but .*reference'),
        (["throughput", "--attention", "prefill=paged,decode=any/referense"], 'no backend "any/referense", but any/'),
        (["table", "pyproject.toml"], "pyproject.toml is no result of a benchmark"),
    ],
)
def test_bad_input_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*arguments)
