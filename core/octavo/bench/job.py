"""One measurement in a process of its own: what goes in, what comes out, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from octavo.bench.exchange import Exchange

Question = TypeVar("Question", bound=msgspec.Struct)
Result = TypeVar("Result", bound=msgspec.Struct)


class ProfileRow(msgspec.Struct, frozen=True):
    """Time of one run that was spent in one place; `operator` names one of the place's operators, or is empty."""

    where: str
    operator: str
    seconds: float
    calls: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is to generate, past any end of sequence."""

    engine: str
    """"octavo" or "transformers"."""
    model: str
    random_weights: bool = False
    """`model` is a configuration, for which both engines draw the same weights: nothing is read."""
    dtype: str
    """Of weights and cache: float32, float16 or bfloat16."""
    attention: str | None = None
    block_size: int | None = None
    compile: bool | None = None
    max_batch_size: int | None = None
    """Most requests that run at once; None: all of them. octavo's alone."""
    max_total_tokens: int | None = None
    """As the setting. octavo's alone."""
    prefix_caching: bool | None = None
    """As the setting. octavo's alone."""
    deterministic: bool = False
    """As the setting. octavo's alone."""
    temperature: float = 0.0
    """0: greedy. octavo's alone."""
    keep_cache: bool = False
    """Leave the warm-up's prefixes in the cache, as a server does: the timed run gets blocks that were never used, and
    whose memory the system hands out then. octavo's alone."""
    exchanges: list[Exchange]
    profile: bool = False


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why nothing could be measured."""

    message: str


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it."""

    seconds: float
    """From the prompts' token ids to the last answer; the model is loaded and warm."""
    start_seconds: float
    """From nothing to an engine that takes requests: reading or drawing weights, compiling, measuring, capturing."""
    answers: list[list[int]]
    """Generated token ids, of each request as many as it wanted."""
    steps: int
    """Forward passes."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its cache."""
    discarded_tokens: int = 0
    """Tokens generated behind the end of their request."""
    backend: str
    block_size: int | None = None
    compiled: bool | None = None
    """Is the model compiled? octavo's alone."""
    captured_rows: list[int] = []
    """Numbers of requests whose decode steps are replays of a graph."""
    device: str
    accelerator: dict[str, str | int | float | None] = {}
    """What is to be told of a device that is no CPU."""
    threads: int
    instructions: str
    """Of the processor, that PyTorch's kernels use."""
    peak_memory_bytes: int
    """Of the whole process, resident, its loading among it."""
    profile: list[ProfileRow] = []


class EngineFailed(ChildProcessError):
    """A measurement's process that ended without one, with what it said."""


def measure(job: Job, threads: int | None = None, path: Path | None = None) -> Measurement:
    """Run a job in a fresh process, so that memory is its own and nothing is warm but what it warmed.

    `path`: a folder in which the process finds further plugins. Raises EngineFailed. Its environment is this
    process's: on a busy machine set OMP_WAIT_POLICY=PASSIVE, or OpenMP threads that spin take the cores from those that
    work, whatever the engine.
    """
    return outcome(job.engine, command("octavo.bench.worker", threads=threads, path=path), job, Measurement)


def command(module: str, *, threads: int | None = None, path: Path | None = None) -> list[str]:
    """A module as a program, in this process's environment but for what is given."""
    variables = [f"OMP_NUM_THREADS={threads}"] if threads else []
    if path is not None:
        variables.append(f"PYTHONPATH={os.pathsep.join([str(path), *filter(None, sys.path)])}")
    return ["env", *variables, sys.executable, "-m", module]


def outcome(name: str, words: Sequence[str], question: msgspec.Struct, kind: type[Result]) -> Result:
    """What a program answers to a question; both are files that its arguments name. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_bytes(msgspec.json.encode(question))
        done = subprocess.run(
            [*words, str(asked), str(answered)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode or not answered.exists():
            raise EngineFailed(f"{name} ended with status {done.returncode}:\n{done.stderr.strip()}")
        result: Result | Failure = msgspec.json.decode(answered.read_bytes(), type=kind | Failure)
    if isinstance(result, Failure):
        raise EngineFailed(f"{name}: {result.message}")
    return result


def program(kind: type[Question], work: Callable[[Question], msgspec.Struct]) -> None:
    """The other end of `outcome`: answer the question in the first file that this program's arguments name."""
    asked, answered = map(Path, sys.argv[1:])
    try:
        answer = work(msgspec.json.decode(asked.read_bytes(), type=kind))
    except Exception as error:
        told = f"{error}" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        answer = Failure(told)
    answered.write_bytes(msgspec.json.encode(answer))
