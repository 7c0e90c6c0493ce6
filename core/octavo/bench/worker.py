"""The process of one measurement: python -m octavo.bench.worker JOB MEASUREMENT."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from octavo.attention.select import choose_device
from octavo.bench import gpu_profile
from octavo.bench.exchange import Exchange
from octavo.bench.job import Job, Measurement, ProfileRow, program
from octavo.bench.machine import accelerator
from octavo.bench.profiler import profiled
from octavo.engine.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.models.capture import Eager
from octavo.models.load import load, load_random
from octavo.plugins import plugins
from octavo.settings import Settings
from octavo.settled import settle

WARM_UP_TOKENS = 8
"""For each request before the clock starts: memory is allocated then, kernels are chosen, code is compiled."""


class Run(NamedTuple):
    """What an engine says of a timed run, beside its time."""

    answers: list[list[int]]
    steps: int
    cached_tokens: int = 0
    discarded_tokens: int = 0


class OctavoEngine:
    """octavo as its users call it."""

    def __init__(self, job: Job) -> None:
        self.llm = LLM(
            job.model, attention=job.attention, dtype=job.dtype, block_size=job.block_size, compile=job.compile,
            max_batch_size=job.max_batch_size, max_total_tokens=job.max_total_tokens,
            prefix_caching=job.prefix_caching, deterministic=job.deterministic or None,
            load_format="dummy" if job.random_weights else None, progress=False,
        )  # fmt: skip
        self._keep_cache, self._temperature = job.keep_cache, job.temperature
        self.backend = self.llm.selection.name
        self.block_size: int | None = self.llm.selection.block_size
        self.device = self.llm.selection.device
        runner = self.llm.engine.runner
        self.torch_device = runner.device
        self.compiled: bool | None = not isinstance(runner.forward, Eager)
        self.captured_rows = runner.graphs.sizes if runner.graphs is not None else []
        if runner.fixed is not None and runner.fixed.captured:
            self.captured_rows = [runner.fixed.tokens]

    def warm_up(self, exchanges: Sequence[Exchange]) -> None:
        """Leaves no prefix in the cache that the timed run could find."""
        if self._keep_cache:
            first = self._unused({one.prompt[0] for one in exchanges})
            self.generate([Exchange([first, *one.prompt[1:]], one.answer_tokens) for one in exchanges])
        else:
            self.generate(exchanges)
            self.llm.engine.scheduler.kv.reset()

    def _unused(self, tokens: Container[int]) -> int:
        """A token id that is none of these: prompts that begin with it have no prefix in common with theirs."""
        unused = next((id for id in range(self.llm.engine.vocab_size) if id not in tokens), None)
        if unused is None:
            raise ValueError("the prompts begin with every token of the vocabulary: take fewer requests")
        return unused

    def generate(self, exchanges: Sequence[Exchange]) -> Run:
        """All requests at once. Raises RuntimeError if one of them fails."""
        params = [
            SamplingParams(max_tokens=exchange.answer_tokens, temperature=self._temperature, ignore_eos=True)
            for exchange in exchanges
        ]
        steps = self.llm.engine.steps
        outputs = self.llm.generate([exchange.prompt for exchange in exchanges], params, progress=False)
        completions = [output.completions[0] for output in outputs]
        if errors := [completion.error for completion in completions if completion.error]:
            raise RuntimeError(errors[0])
        answers = [completion.token_ids for completion in completions]
        return Run(answers, self.llm.engine.steps - steps, sum(output.cached_tokens for output in outputs))


class TransformersEngine:
    """transformers' `generate` on one batch, padded on the left, which runs until its longest answer is there."""

    block_size: int | None = None
    compiled: bool | None = None
    captured_rows: Sequence[int] = ()

    def __init__(self, job: Job) -> None:
        device = choose_device(Settings().device, plugins())
        dtype, self.torch_device = getattr(torch, job.dtype), device.torch_device
        if job.random_weights:
            loaded = load_random(job.model, dtype=dtype, device=self.torch_device, attention=None)
        else:
            loaded = load(job.model, dtype=dtype, device=self.torch_device, attention=None, progress=False)
        self.model: Any = loaded.model
        self.backend = str(self.model.config._attn_implementation)
        self.padding = (loaded.tokenizer and loaded.tokenizer.pad_token_id) or 0
        # What `generate` is not told it takes from here, an end of sequence among it.
        self.model.generation_config = GenerationConfig(pad_token_id=self.padding)
        self.device = device.name

    def warm_up(self, exchanges: Sequence[Exchange]) -> None:
        """The timed run starts from nothing but this."""
        self.generate(exchanges)

    def generate(self, exchanges: Sequence[Exchange]) -> Run:
        """One batch of all requests."""
        ids, mask = self._padded(exchanges)
        steps = max(exchange.answer_tokens for exchange in exchanges)
        with torch.inference_mode():
            out: Tensor = self.model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=steps)
        generated = out[:, ids.shape[1] :].tolist()
        if len(generated[0]) != steps:
            raise RuntimeError(f"generate stopped at {len(generated[0])} tokens, {steps} were to come")
        answers = [tokens[: exchange.answer_tokens] for tokens, exchange in zip(generated, exchanges, strict=True)]
        return Run(answers, steps, discarded_tokens=steps * len(answers) - sum(map(len, answers)))

    def _padded(self, exchanges: Sequence[Exchange]) -> tuple[Tensor, Tensor]:
        """[requests, longest prompt] int64 each: token ids, and 1 where they count."""
        longest = max(len(exchange.prompt) for exchange in exchanges)
        gaps = [longest - len(exchange.prompt) for exchange in exchanges]
        ids = [[self.padding] * gap + list(exchange.prompt) for gap, exchange in zip(gaps, exchanges, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


ENGINES: dict[str, Callable[[Job], OctavoEngine | TransformersEngine]] = {
    "octavo": OctavoEngine,
    "transformers": TransformersEngine,
}


def run(job: Job) -> Measurement:
    """Load, warm up, measure."""
    start = time.perf_counter()
    engine = ENGINES[job.engine](job)
    start_seconds = time.perf_counter() - start
    engine.warm_up([Exchange(each.prompt, min(WARM_UP_TOKENS, each.answer_tokens)) for each in job.exchanges])
    settle()  # as the server's engine does
    rows: list[ProfileRow] = []
    if job.profile and isinstance(engine, OctavoEngine):
        look = gpu_profile.profiled if engine.torch_device.type == "cuda" else profiled
        (result, seconds), rows = look(engine.llm.engine.runner, lambda: timed(engine, job.exchanges))
    else:
        result, seconds = timed(engine, job.exchanges)
    return Measurement(
        seconds=seconds,
        start_seconds=start_seconds,
        answers=result.answers,
        steps=result.steps,
        cached_tokens=result.cached_tokens,
        discarded_tokens=result.discarded_tokens,
        backend=engine.backend,
        block_size=engine.block_size,
        compiled=engine.compiled,
        captured_rows=list(engine.captured_rows),
        device=engine.device,
        accelerator=accelerator(engine.torch_device),
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        peak_memory_bytes=peak_memory(),
        profile=rows,
    )


def timed(engine: OctavoEngine | TransformersEngine, exchanges: Sequence[Exchange]) -> tuple[Run, float]:
    """What came of it, and the seconds it took."""
    start = time.perf_counter()
    result = engine.generate(exchanges)
    return result, time.perf_counter() - start


def peak_memory() -> int:
    """The most bytes that were resident in this process.

    Linux's getrusage counts what the parent held before this program started, so /proc is asked where there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    program(Job, run)
