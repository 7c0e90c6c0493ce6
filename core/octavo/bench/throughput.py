"""How fast a model answers: octavo, with one backend or several, and transformers' `generate`, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from octavo.attention.installed import backends
from octavo.attention.wish import UnknownBackend, close_matches, parse
from octavo.bench.exchange import Exchange
from octavo.bench.job import Job, Measurement, ProfileRow, measure
from octavo.bench.machine import Fact, machine
from octavo.bench.profiler import ENGINE, MODEL
from octavo.bench.report import Report
from octavo.bench.workload import Range, Source, Uniform, model_folder
from octavo.models.source import configuration_at
from octavo.plugins import Plugins

OCTAVO, UNCOMPILED, PEER = "octavo", "octavo, not compiled", "transformers"
DTYPES = ("float32", "float16", "bfloat16")
SHOWN_SHARE = 0.005
"""Of the run: operators with less are left out of a profile."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What takes a turn."""

    name: str
    attention: str | None = None
    """octavo's backend; None: the best one."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, their lengths drawn from these ranges of tokens."""

    requests: int
    prompts: Range
    answers: Range

    def __str__(self) -> str:
        return f"{self.requests} of {self.prompts} tokens in, {self.answers} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and how."""

    model: str
    """A folder, a GGUF file or a hub name; with random weights a folder or a file with a configuration."""
    name: str
    """What the reader of a result calls it."""
    random_weights: bool = False
    loads: Sequence[Load]
    seed: int = 0
    """Of the requests."""
    sharegpt: bool | None = None
    uniform: bool = False
    """Draw the requests as nano-vllm's benchmark does."""
    temperature: float = 0.0
    """Above 0 there is no peer: its tokens would be others."""
    dtype: str = "float32"
    attention: Sequence[str] = ()
    """Measure octavo with each of these backends, in turn; none: with the best one."""
    block_size: int | None = None
    max_total_tokens: int | None = None
    prefix_caching: bool | None = None
    deterministic: bool = False
    uncompiled: bool = False
    """Measure octavo with COMPILE=0 as well, in turn."""
    threads: int | None = None
    repeats: int = 3
    peer: bool = True
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """One load's measurements: those of one index ran one after the other."""

    load: Load
    taken: Mapping[Engine, list[Measurement]]
    profile: Measurement | None = None

    @property
    def peer(self) -> list[Measurement]:
        """Empty where it took no turns."""
        return self.taken.get(Engine(PEER), [])

    @property
    def octavo(self) -> list[Measurement]:
        """With the first backend."""
        return next(measured for engine, measured in self.taken.items() if engine.name == OCTAVO)


def run(options: Options, say: Callable[[str], None]) -> tuple[Report, Report | None]:
    """Measure each load; the second report is the profile, where it is wanted. Raises EngineFailed or ValueError."""
    where = machine()  # as busy as it is before it measures
    source = Uniform.of(options.model) if options.uniform else Source.of(options.model, options.sharegpt)
    rows: list[dict[str, Fact]] = []
    profiled: list[dict[str, Fact]] = []
    for load in options.loads:
        exchanges = source.generation(load.requests, load.prompts, load.answers, options.seed)
        turns = _take_turns(options, load, exchanges, say)
        rows += throughput_rows(turns, exchanges)
        if turns.profile is not None:
            profiled += profile_rows(turns.profile, load, median(each.seconds for each in turns.octavo))
    first = turns.octavo[0]
    workload, where = _workload(options, source.name, first), where | first.accelerator
    report = Report(bench="throughput", machine=where, workload=workload, rows=rows)
    profile = Report(bench="profile", machine=where, workload=workload, rows=profiled) if options.profile else None
    return report, profile


def _take_turns(options: Options, load: Load, exchanges: list[Exchange], say: Callable[[str], None]) -> Turns:
    taken: dict[Engine, list[Measurement]] = {engine: [] for engine in _engines(options)}
    for turn in range(options.repeats):
        for engine, measured in taken.items():
            with_ = f" with {engine.attention}" if engine.attention else ""
            say(f"{load.requests} requests, {turn + 1} of {options.repeats}: {engine.name}{with_}")
            measured.append(measure(_job(options, engine, exchanges), options.threads))
    profile = None
    if options.profile:
        say(f"{load.requests} requests: profile")
        first = next(engine for engine in taken if engine.name == OCTAVO)
        profile = measure(_job(options, first, exchanges, profile=True), options.threads)
    return Turns(load, taken, profile)


def _engines(options: Options) -> list[Engine]:
    names = [OCTAVO, UNCOMPILED] if options.uncompiled else [OCTAVO]
    ours = [Engine(name, attention) for attention in options.attention or (None,) for name in names]
    return [Engine(PEER), *ours] if options.peer else ours


def _job(options: Options, engine: Engine, exchanges: list[Exchange], profile: bool = False) -> Job:
    return Job(
        engine=PEER if engine.name == PEER else OCTAVO,
        model=options.model,
        random_weights=options.random_weights,
        dtype=options.dtype,
        attention=engine.attention,
        block_size=options.block_size,
        max_total_tokens=options.max_total_tokens,
        prefix_caching=options.prefix_caching,
        deterministic=options.deterministic,
        temperature=options.temperature,
        compile=False if engine.name == UNCOMPILED else None,
        exchanges=exchanges,
        profile=profile,
    )


def _workload(options: Options, prompts: str, measured: Measurement) -> dict[str, Fact]:
    return {
        "model": options.name,
        "requests": "; ".join(map(str, options.loads)),
        "temperature": options.temperature or None,
        "dtype": options.dtype,
        "max_total_tokens": options.max_total_tokens,
        "prefix_caching": _switch(options.prefix_caching),
        "deterministic": _switch(options.deterministic or None),
        "prompts": prompts,
        "seed": options.seed,
        "repeats": options.repeats,
        "device": measured.device,
        "threads": measured.threads,
        "instructions": measured.instructions,
    }


def throughput_rows(turns: Turns, exchanges: Sequence[Exchange]) -> list[dict[str, Fact]]:
    """A row for each engine that ran."""
    return [_row(engine.name, measured, turns, exchanges) for engine, measured in turns.taken.items()]


def _row(engine: str, measured: list[Measurement], turns: Turns, exchanges: Sequence[Exchange]) -> dict[str, Fact]:
    output = sum(exchange.answer_tokens for exchange in exchanges)
    first = measured[0]
    return {
        "engine": engine,
        "requests": turns.load.requests,
        **spread_of("output_tokens_per_second", [output / each.seconds for each in measured], 2),
        **spread_of("output_tokens_per_second_ratio", _ratios(measured, turns.peer), 3),
        "wall_seconds": round(median(each.seconds for each in measured), 3),
        "start_seconds": round(median(each.start_seconds for each in measured), 2),
        "prompt_tokens": sum(len(exchange.prompt) for exchange in exchanges),
        "output_tokens": output,
        "cached_tokens": first.cached_tokens,
        "discarded_tokens": first.discarded_tokens,
        "steps": first.steps,
        "peak_memory_mb": round(max(each.peak_memory_bytes for each in measured) / 1e6),
        "backend": first.backend,
        "block_size_tokens": first.block_size,
        "compile": _switch(first.compiled),
        "graphs": _graphs(first.captured_rows) if first.compiled is not None else None,
        "identical_requests": identical(first, turns.peer[0]) if turns.peer and engine != PEER else None,
    }


def _switch(on: bool | None) -> str | None:
    return None if on is None else "on" if on else "off"


def _graphs(rows: Sequence[int]) -> str:
    return f"{len(rows)}, for up to {rows[-1]} requests" if rows else "none"


def spread_of(name: str, values: Sequence[float], digits: int) -> dict[str, Fact]:
    """The median, the least and the most; none of them without values."""
    if not values:
        return {}
    named = {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, digits) for key, value in named.items()}


def _ratios(measured: Sequence[Measurement], peer: Sequence[Measurement]) -> list[float]:
    """Turn by turn, since a machine's speed drifts: how many times the peer's tokens a second."""
    return [other.seconds / each.seconds for each, other in zip(measured, peer, strict=True)] if peer else []


def identical(one: Measurement, other: Measurement) -> int:
    """Requests whose answers have the same tokens, all of them."""
    return sum(mine == theirs for mine, theirs in zip(one.answers, other.answers, strict=True))


def profile_rows(measured: Measurement, load: Load, seconds: float) -> list[dict[str, Fact]]:
    """A row for the whole, for each place, and for each operator that matters."""
    on_host = measured.device == "cpu"  # elsewhere a few steps were looked at, not the run
    whole = measured.seconds if on_host else sum(each.seconds for each in measured.profile if not each.operator)

    def row(each: ProfileRow) -> dict[str, Fact]:
        return {
            "requests": load.requests,
            "where": each.where,
            "operator": each.operator,
            "wall_seconds": round(each.seconds, 4),
            "share_percent": round(100 * each.seconds / (whole or 1), 2),
            "calls": each.calls,
        }

    shown = [each for each in measured.profile if _is_shown(each, whole)]
    rows = [row(each) for each in (*shown, ProfileRow("all", "", whole, 1))]
    if on_host:
        rows.append(row(ProfileRow("without the profiler", "", seconds, 1)))
    return rows


def _is_shown(row: ProfileRow, whole: float) -> bool:
    """A place always; an operator that matters, but not the Python of a place that is nothing else."""
    return not row.operator or (row.seconds >= SHOWN_SHARE * whole and row.where not in (MODEL, ENGINE))


def check_names(attention: Sequence[str], installed: Plugins) -> None:
    """Before minutes are measured: raises UnknownBackend for what nobody has. Whether it can run, its turn tells."""
    qualified = [one.kind.qualified_name() for one in backends(installed)]
    known = dict.fromkeys([*qualified, *(name.partition("/")[2] for name in qualified)])
    for text in attention:
        wish = parse(text)
        for name in wish.phases or ((wish.name,) if wish.name else ()):
            if name not in map(str.casefold, known):
                close = close_matches(name, known) or qualified
                raise UnknownBackend(f'--attention {text}: there is no backend "{name}", but {", ".join(close)}')


def model_of(name: str | None, random_config: Path | None, dtype: str) -> str:
    """As `Options` takes it. Raises ValueError for a dtype that is none of DTYPES, and ModelNotFound."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}: give one of {', '.join(DTYPES)}")
    return model_folder(name) if random_config is None else str(configuration_at(random_config))
