"""An engine whose runner computes on the slot memory, in the place of a model."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from octavo.engine.engine import Engine
from octavo.engine.limits import Limits
from octavo.engine.output import Output
from octavo.engine.request import FinishReason
from octavo.engine.runner import Flight, OutOfMemory, Runner, StepResult
from octavo.engine.sampled import Sampled, TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import Step
from octavo.kv.manager import KVCacheManager
from octavo.plugins import Plugins
from tests.engine.slot_memory import Integers, SlotMemory

VOCABULARY = 97


class Landed(NamedTuple):
    """A step's tokens, which nobody has asked for yet."""

    result: StepResult
    runner: "MemoryRunner"

    def wait(self) -> StepResult:
        error, self.runner.failing_wait = self.runner.failing_wait, None
        if error is not None:
            raise error
        return self.result


class MemoryRunner(Runner):
    """Takes a step's arrays as a device does, and computes on the slot memory."""

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory
        self.failing: BaseException | None = None
        """Raised by the next launch, once it has written."""
        self.failing_wait: BaseException | None = None
        """Raised by whoever waits next."""
        self.most_tokens: int | None = None
        """A step of more does not fit into the device's memory."""
        self.followed = 0
        """Steps that began with tokens which the engine did not know."""
        self.told = np.zeros(1, dtype=np.int64)

    def launch(self, step: Step) -> Flight:
        """Computes at once; tokens are told when the engine waits for them, and to the next step before that."""
        ids = step.token_ids
        if self.most_tokens is not None and len(ids) > self.most_tokens:
            raise OutOfMemory(f"{len(ids)} tokens do not fit")
        self.followed += step.follows
        step = replace(step, token_ids=np.where(ids < 0, self.told[np.maximum(-1 - ids, 0)], ids))
        result = self._run(step)
        self.told = np.resize(result.sampled.token_ids, max(1, len(result.sampled.token_ids)))
        return cast(Flight, Landed(result, self))

    def _run(self, step: Step) -> StepResult:
        self.memory.copy(map(tuple, step.copies.tolist()))
        contexts = [self._write(step, row) for row in range(len(step.context_lengths))]
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        ends = {int(start) - 1: context for start, context in zip(step.query_starts[1:], contexts, strict=True)}
        sampling = len(step.sampling)
        tokens = [self.memory.read(ends[token]) for token in step.logits_of[:sampling].tolist()]
        return StepResult(Sampled(np.array(tokens, dtype=np.int64)), self._prompts(step, sampling))

    def _write(self, step: Step, row: int) -> Integers:
        """Write a row's tokens; returns the slots of its whole context."""
        tokens = slice(int(step.query_starts[row]), int(step.query_starts[row + 1]))
        context, size = int(step.context_lengths[row]), self.memory.block_size
        positions = np.arange(context)
        blocks: Integers = step.block_table[row][positions // size].astype(np.int64)
        slots = blocks * size + positions % size
        written = step.token_ids[tokens]
        assert (written.size == 1) == (row < step.decodes)
        assert np.array_equal(step.positions[tokens], positions[context - written.size :])
        assert np.array_equal(step.slots[tokens], slots[context - written.size :])
        self.memory.write(slots[context - written.size :], written, slots[: context - written.size])
        return slots

    def _prompts(self, step: Step, start: int) -> list[TokenLogprobs]:
        """The tokens whose log-probabilities are asked for, in place of these."""
        answers = []
        for wanted in step.prompts:
            asked = step.logits_of[start : start + wanted.tokens]
            first = step.query_starts[wanted.row] + wanted.first
            assert np.array_equal(asked, np.arange(first, first + wanted.tokens))
            none = np.empty((wanted.tokens, 0))
            answers.append(
                TokenLogprobs(wanted.next_ids.astype(np.float32), none.astype(np.int64), none.astype(np.float32))
            )
            start += wanted.tokens
        assert start == len(step.logits_of)
        return answers


@dataclass
class Answers:
    """What an engine's steps brought, by request."""

    engine: Engine
    runner: MemoryRunner
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    last: dict[int, Output] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    broke_off: bool = False
    """Somebody interrupted a step: the next one may bring the tokens of two."""

    def step(self) -> None:
        outputs = self.engine.step()
        going = [output.request_id for output in outputs if output.error is None]
        assert len(set(going)) == len(going) or self.broke_off, "one token a step"
        for output in outputs:
            assert output.request_id not in self.ended, "an ended request goes on"
            self.last[output.request_id] = output
            if output.token_id is not None:
                self.tokens[output.request_id].append(output.token_id)
            if output.prompt is not None:
                self.prompts[output.request_id] += output.prompt.logprobs.astype(int).tolist()

    @property
    def ended(self) -> dict[int, FinishReason]:
        last = self.last.items()
        return {request: output.finish_reason for request, output in last if output.finish_reason is not None}

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.step()
        stats = self.engine.scheduler.kv.stats()
        assert not self.engine.busy
        assert stats.free + stats.cached == stats.total

    def submit(self, prompt: Sequence[int], max_tokens: int | None = 5, **params: Any) -> int:
        namespace = params.pop("namespace", None)
        return self.engine.submit(prompt, SamplingParams(max_tokens=max_tokens, **params), seed=0, namespace=namespace)


def start_engine(
    *, ahead: bool, block_size: int = 4, blocks: int = 100, end_ids: Sequence[int] = (), **limits: Any
) -> Answers:
    defaults = {"max_input_tokens": 500, "max_total_tokens": 500, "max_batch_prefill_tokens": 500}
    scheduler = Scheduler(KVCacheManager(blocks + 1, block_size), Limits(**(defaults | limits)))
    runner = MemoryRunner(SlotMemory(blocks + 1, block_size, VOCABULARY))
    return Answers(Engine(scheduler, runner, frozenset(end_ids), VOCABULARY, Plugins([]), ahead=ahead), runner)


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * index) % VOCABULARY for index in range(length)]
