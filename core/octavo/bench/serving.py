"""How a server answers its clients, and what that costs the engine: `octavo serve` and `octavo.LLM` in turn."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from msgspec.structs import replace

from octavo.bench import steps
from octavo.bench.exchange import Exchange
from octavo.bench.job import EngineFailed, Job, Measurement, measure
from octavo.bench.latency import Latency, Objectives, latencies, percentiles
from octavo.bench.machine import Fact, machine
from octavo.bench.report import Report
from octavo.bench.server_process import Server, octavo_serve
from octavo.bench.steps import Record, StepTime, by_size, recorded
from octavo.bench.throughput import Load, spread_of
from octavo.bench.traffic import Traced, Traffic, poisson, send
from octavo.bench.worker import WARM_UP_TOKENS
from octavo.bench.workload import Source
from octavo.settings import Settings

SERVER, ENGINE = "octavo serve", "octavo.LLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and how."""

    model: str
    """A folder, a GGUF file or a hub name."""
    name: str
    """What the reader of a result calls it."""
    load: Load
    streams: int | None = None
    """Closed loop, with so many clients."""
    rate: float | None = None
    """Open loop: requests a second, by a Poisson process."""
    url: str | None = None
    """A server that runs; None: start `octavo serve`."""
    objectives: Objectives | None = None
    seed: int = 0
    sharegpt: bool | None = None
    dtype: str = "float32"
    attention: str | None = None
    block_size: int | None = None
    threads: int | None = None
    repeats: int = 4
    peer: bool = True
    """Measure octavo.LLM as well, in turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run through the server, and the engine's own beside it."""

    traced: Traced
    server_cpu_seconds: float | None = None
    served_steps: list[StepTime] = field(default_factory=list)
    measured: Measurement | None = None
    measured_steps: list[StepTime] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Output tokens a second, through the server."""
        return self.traced.output_tokens / self.traced.seconds


@dataclass(frozen=True, slots=True)
class Found:
    """What came of all turns."""

    report: Report
    steps: Report | None
    """Step times by batch size, where the engine ran by itself too."""
    latencies: list[Latency]


def run(options: Options, say: Callable[[str], None]) -> Found:
    """Measure. Raises EngineFailed or ValueError; a request that fails is counted, not raised."""
    where = machine()
    source = Source.of(options.model, options.sharegpt)
    load = options.load
    exchanges = source.generation(load.requests, load.prompts, load.answers, options.seed)
    turns = []
    for number in range(options.repeats):
        say(f"{number + 1} of {options.repeats}")
        turns.append(_take_turns(options, exchanges, engine_first=number % 2 == 1))
    workload = _workload(options, source, turns)
    where |= turns[0].measured.accelerator if turns[0].measured else {}
    report = Report(bench="serving", machine=where, workload=workload, rows=rows(options, turns, exchanges))
    sizes = _step_rows(turns) if options.peer else []
    return Found(
        report,
        Report(bench="serving-steps", machine=where, workload=workload, rows=sizes) if sizes else None,
        latencies(answer for turn in turns for answer in turn.traced.answers),
    )


def _take_turns(options: Options, exchanges: list[Exchange], engine_first: bool) -> Turn:
    """The other way round every second time: a machine's speed drifts, and who always came second would gain by it."""
    if not options.peer:
        return _through_server(options, exchanges)
    if engine_first:
        measured, steps_alone = _through_engine(options, exchanges)
        turn = _through_server(options, exchanges)
    else:
        turn = _through_server(options, exchanges)
        measured, steps_alone = _through_engine(options, exchanges)
    return Turn(turn.traced, turn.server_cpu_seconds, turn.served_steps, measured, steps_alone)


def _through_server(options: Options, exchanges: list[Exchange]) -> Turn:
    arrivals = None if options.rate is None else poisson(options.rate, len(exchanges), options.seed)
    with recorded() as record, _server(options, record) as server:
        key = next(iter(Settings().api_key), None)
        served = server.get("/v1/models", key)["data"][0]["id"]
        traffic = Traffic(
            url=server.url, model=served, exchanges=exchanges, streams=options.streams, arrivals=arrivals, api_key=key,
            cache_salt=secrets.token_hex(8),  # a server that goes on has answered these prompts before
        )  # fmt: skip
        _warm_up(traffic)
        steps_before, cpu_before = len(record.steps()), server.cpu_seconds()
        traced = send(traffic)
        cpu = server.cpu_seconds()
        spent = None if cpu is None or cpu_before is None else cpu - cpu_before
        return Turn(traced, spent, record.steps()[steps_before:])


@contextmanager
def _server(options: Options, record: Record) -> Iterator[Server]:
    if options.url is not None:
        yield Server(options.url)
        return
    given = {
        "dtype": options.dtype,
        "attention": options.attention,
        "block-size": options.block_size,
        "max-batch-size": options.streams,
        "max-concurrent-requests": options.streams,
    }
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    with octavo_serve([options.model, *flags], threads=options.threads, path=record.folder) as server:
        yield server


def _warm_up(traffic: Traffic) -> None:
    """As `octavo bench throughput` does, a few tokens of each; under another salt, so that no prefix is found later."""
    short = [Exchange(each.prompt, min(WARM_UP_TOKENS, each.answer_tokens)) for each in traffic.exchanges]
    streams = traffic.streams or min(len(short), 8)
    warmed = send(replace(traffic, exchanges=short, streams=streams, arrivals=None, cache_salt=secrets.token_hex(8)))
    if all(answer.error for answer in warmed.answers):
        raise EngineFailed(f"{traffic.url} answers no request: {warmed.answers[0].error}")


def _through_engine(options: Options, exchanges: list[Exchange]) -> tuple[Measurement, list[StepTime]]:
    job = Job(
        engine="octavo",
        model=options.model,
        dtype=options.dtype,
        attention=options.attention,
        block_size=options.block_size,
        max_batch_size=options.streams,
        keep_cache=True,
        exchanges=exchanges,
    )
    with recorded() as record:
        measured = measure(job, options.threads, record.folder)
        return measured, record.steps()[-measured.steps :]


def _workload(options: Options, source: Source, turns: Sequence[Turn]) -> dict[str, Fact]:
    failures = Counter(answer.error for turn in turns for answer in turn.traced.answers if answer.error is not None)
    first = turns[0].measured
    return {
        "model": options.name,
        "requests": str(options.load),
        "streams": options.streams,
        "poisson_requests_per_second": options.rate,
        "slo": None if options.objectives is None else str(options.objectives),
        "dtype": options.dtype if options.url is None else None,
        "prompts": source.name,
        "seed": options.seed,
        "repeats": options.repeats,
        "threads": options.threads if first is None else first.threads,
        "instructions": None if first is None else first.instructions,
        "failures": "; ".join(f"{count} of {reason}" for reason, count in failures.most_common(5)) or None,
    }


def rows(options: Options, turns: Sequence[Turn], exchanges: Sequence[Exchange]) -> list[dict[str, Fact]]:
    """The server's row, and the engine's where it ran by itself too."""
    output = sum(exchange.answer_tokens for exchange in exchanges)
    pairs = [(turn, turn.measured) for turn in turns if turn.measured is not None]
    served = _served(options, turns) | {
        **spread_of("output_tokens_per_second_ratio", [turn.rate * one.seconds / output for turn, one in pairs], 4),
        **_step_spread([turn for turn, _ in pairs]),
    }
    if not pairs:
        return [served]
    alone = [one for _, one in pairs]
    engine: dict[str, Fact] = {
        "engine": ENGINE,
        "requests": len(exchanges),
        **spread_of("output_tokens_per_second", [output / one.seconds for one in alone], 2),
        "wall_seconds": round(median(one.seconds for one in alone), 3),
        "steps": alone[0].steps,
    }
    return [served, engine]


def _served(options: Options, turns: Sequence[Turn]) -> dict[str, Fact]:
    answers = [answer for turn in turns for answer in turn.traced.answers]
    found = latencies(answers)
    seconds = sum(turn.traced.seconds for turn in turns)
    spent = [turn.server_cpu_seconds for turn in turns if turn.server_cpu_seconds is not None]
    tokens = sum(turn.traced.output_tokens for turn in turns)
    row: dict[str, Fact] = {
        "engine": options.url or SERVER,
        "requests": options.load.requests,
        **spread_of("output_tokens_per_second", [turn.rate for turn in turns], 2),
        "wall_seconds": round(median(turn.traced.seconds for turn in turns), 3),
        "steps": len(turns[0].served_steps) or None,
        "failed_requests": sum(answer.error is not None for answer in answers),
        "answered_requests_per_second": round(len(found) / seconds, 3),
        **percentiles(found),
        "server_cpu_per_token_seconds": round(sum(spent) / tokens, 7) if spent and tokens else None,
        "clients_cpu_per_token_seconds": round(sum(turn.traced.cpu_seconds for turn in turns) / tokens, 7)
        if tokens
        else None,
    }
    if options.objectives is not None:
        good = sum(map(options.objectives.met_by, found))
        row |= {
            "good_requests_per_second": round(good / seconds, 3),
            "good_percent": round(100 * good / len(answers), 2),
        }
    return row


def _step_spread(turns: Sequence[Turn]) -> dict[str, Fact]:
    ratios = [steps.ratio(by_size(turn.served_steps, turn.measured_steps)) for turn in turns]
    return spread_of("step_seconds_ratio", [each for each in ratios if each is not None], 4)


def _step_rows(turns: Sequence[Turn]) -> list[dict[str, Fact]]:
    """A row for each batch size, of all turns together."""
    served = [step for turn in turns for step in turn.served_steps]
    alone = [step for turn in turns for step in turn.measured_steps]
    return [
        {
            "running_requests": size.rows,
            "served_step_seconds": round(size.seconds, 6),
            "served_steps": size.steps,
            "engine_step_seconds": round(size.other_seconds, 6),
            "engine_steps": size.other_steps,
            "step_seconds_ratio": round(size.ratio, 4),
        }
        for size in by_size(served, alone)
    ]
