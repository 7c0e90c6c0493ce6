"""One measurement in a process of its own: what goes in, what comes out, and how it is started."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from octavo.bench.workload import Exchange


class ProfileRow(msgspec.Struct, frozen=True):
    """Time of one run that was spent in one place; `operator` names one of the place's operators, or is empty."""

    where: str
    operator: str
    seconds: float
    calls: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is to generate, greedily and past any end of sequence."""

    engine: str
    """"octavo" or "transformers"."""
    model: str
    dtype: str
    """Of weights and cache: float32, float16 or bfloat16."""
    attention: str | None = None
    block_size: int | None = None
    compile: bool | None = None
    exchanges: list[Exchange]
    profile: bool = False


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why nothing could be measured."""

    message: str


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it."""

    seconds: float
    """From the prompts' token ids to the last answer; the model is loaded and warm."""
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
    device: str
    threads: int
    instructions: str
    """Of the processor, that PyTorch's kernels use."""
    peak_memory_bytes: int
    """Of the whole process, resident, its loading among it."""
    profile: list[ProfileRow] = []


class EngineFailed(ChildProcessError):
    """A measurement's process that ended without one, with what it said."""


def measure(job: Job, threads: int | None = None) -> Measurement:
    """Run a job in a fresh process, so that memory is its own and nothing is warm but what it warmed.

    Raises EngineFailed. Its environment is this process's: on a busy machine set OMP_WAIT_POLICY=PASSIVE, or OpenMP
    threads that spin take the cores from those that work, whatever the engine.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        question, answer = Path(folder) / "job.json", Path(folder) / "measurement.json"
        question.write_bytes(msgspec.json.encode(job))
        variables = [f"OMP_NUM_THREADS={threads}"] if threads else []
        command = ["env", *variables, sys.executable, "-m", "octavo.bench.worker", str(question), str(answer)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not answer.exists():
            raise EngineFailed(f"{job.engine} ended with status {done.returncode}:\n{done.stderr.strip()}")
        result = msgspec.json.decode(answer.read_bytes(), type=Measurement | Failure)
    if isinstance(result, Failure):
        raise EngineFailed(f"{job.engine}: {result.message}")
    return result
