"""Kernels for hardware that is not here: compiled, and what each takes of its target."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from octavo.attention.ahead import AheadOfTime
from octavo.attention.installed import backends
from octavo.attention.wish import close_matches
from octavo.bench.machine import Fact, versions
from octavo.bench.report import Report
from octavo.plugins import Plugins, describe


@dataclass(frozen=True, slots=True)
class Kernels:
    """One backend's for one target."""

    target: str
    backend: str
    ahead: AheadOfTime


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the work, counted from 1, of so many."""

    number: int
    count: int

    @classmethod
    def read(cls, text: str) -> Shard:
        """From such as "2/4". Raises ValueError on anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"shard is {text}, it must be a part and how many there are, such as 2/4")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is compiled."""

    targets: Sequence[str]
    """As a backend or Triton calls them: "gfx942", "hip:gfx942", "sm_90", "cuda:90". None: all."""
    attention: Sequence[str] = ()
    """Backends, as NAME or PLATFORM/NAME. None: all that have kernels for the target."""
    complete: bool = True
    """Every value that a backend declares at least once; or the configurations that are most unlike."""
    configurations: Sequence[str] = ()
    """By name; none: all of these."""
    shard: Shard = Shard(1, 1)
    cache: Path
    """A folder for what was compiled."""


def run(options: Options, progress: Callable[[str], None], installed: Plugins) -> Report:
    """Compile; what fails is a row with a fault. Interrupted, it gives what it has, and `workload` says so.

    Raises ValueError for a target or a backend that nobody has, and for a cache that cannot be written.
    """
    everything = _jobs(options, installed)
    _check_writable(options.cache)
    shard = options.shard
    jobs = everything[shard.number - 1 :: shard.count]
    rows: list[dict[str, Fact]] = []
    done = 0
    try:
        for kernels, configuration in jobs:
            progress(f"{done + 1} of {len(jobs)}: {kernels.target}, {kernels.backend}, {configuration}")
            rows += _compiled(kernels, configuration, options.cache)
            done += 1
    except KeyboardInterrupt:
        pass
    empty = "" if jobs else f", which has none of {len(everything)} configurations"
    workload: dict[str, Fact] = {
        "targets": ", ".join(dict.fromkeys(kernels.target for kernels, _ in jobs)) or None,
        "configurations": f"{len(jobs)}, {'every declared value' if options.complete else 'those most unlike'}",
        "shard": None if shard.count == 1 else f"{shard.number}/{shard.count}{empty}",
        "not whole": None if done == len(jobs) else f"interrupted after {done} of {len(jobs)} configurations",
    }
    return Report(bench="compiled", versions=versions() | compiler(), workload=workload, rows=rows)


def _check_writable(cache: Path) -> None:
    """Now, and not once for each configuration."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=cache).close()
    except OSError as error:
        raise ValueError(f"cache {cache} cannot be written: {error.strerror}. Name another folder") from None


def _compiled(kernels: Kernels, configuration: str, cache: Path) -> list[dict[str, Fact]]:
    where: dict[str, Fact] = {"target": kernels.target, "backend": kernels.backend}
    try:
        return [where | asdict(one) for one in kernels.ahead.compile(configuration, cache)]
    except Exception as error:  # whatever a compiler says: the others are compiled
        return [where | {"configuration": configuration, "fault": describe(error)}]


def compiler() -> dict[str, Fact]:
    """Triton's version, if it is there: other backends may have other compilers."""
    return {"triton": version("triton")} if find_spec("triton") else {}


def _jobs(options: Options, installed: Plugins) -> list[tuple[Kernels, str]]:
    jobs = [
        (kernels, configuration)
        for kernels in found(options.targets, options.attention, installed)
        for configuration in kernels.ahead.configurations(complete=options.complete or bool(options.configurations))
    ]
    if not options.configurations:
        return jobs
    known = dict.fromkeys(configuration for _, configuration in jobs)
    if unknown := [name for name in options.configurations if name not in known]:
        close = close_matches(unknown[0], known) or list(known)[:3]
        raise ValueError(
            f'there is no configuration "{unknown[0]}", of {len(known)} such as {", ".join(close)}: '
            "the table without --configuration names them"
        )
    return [job for job in jobs if job[1] in options.configurations]


def found(targets: Sequence[str], attention: Sequence[str], installed: Plugins) -> list[Kernels]:
    """Those of these targets and backends. Raises ValueError with what there is."""
    everything, absent = _everything(installed)
    wanted = [_spelled(target) for target in targets] or list(dict.fromkeys(one.target for one in everything))
    for target in wanted or ["any target"]:
        if target not in {one.target for one in everything}:
            known = ", ".join(dict.fromkeys(one.target for one in everything)) or "none"
            others = "".join(f", and not for those of {', '.join(names)}: {reason}" for reason, names in absent.items())
            raise ValueError(f"no installed backend has kernels for {target}: there are those for {known}{others}")
    able = [one for target in wanted for one in everything if one.target == target]
    for name in attention:
        if not any(_named(one, [name]) for one in able):
            names = ", ".join(dict.fromkeys(one.backend for one in able))
            raise ValueError(f"{name} has no kernels for {', '.join(wanted)}: {names} have")
    return [one for one in able if _named(one, attention)]


def _everything(installed: Plugins) -> tuple[list[Kernels], dict[str, list[str]]]:
    """All there are, and backends by the reason why what compiles their kernels is not there."""
    kernels: list[Kernels] = []
    absent: dict[str, list[str]] = {}
    for registered in backends(installed):
        name = registered.kind.qualified_name()
        try:
            kernels += [Kernels(target, name, ahead) for target, ahead in registered.kind.ahead().items()]
        except ImportError as error:
            absent.setdefault(str(error), []).append(name)
    return kernels, absent


def _spelled(target: str) -> str:
    """Triton's words for a target as the makers have them."""
    return target.replace("cuda:", "sm_").replace("hip:", "")


def _named(kernels: Kernels, attention: Sequence[str]) -> bool:
    return not attention or any(name in (kernels.backend, kernels.backend.partition("/")[2]) for name in attention)
