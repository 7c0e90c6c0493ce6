"""A runner that computes a step's arrays on the slot memory, in the place of a model."""

from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from octavo.engine.runner import Flight, Runner, StepResult
from octavo.engine.sampler import Sampled, TokenLogprobs
from octavo.engine.step import Step
from tests.engine.slot_memory import Integers, SlotMemory


class Landed(NamedTuple):
    """A step's tokens, which nobody has asked for yet."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class MemoryRunner(Runner):
    """Takes a step's arrays as a device does, and computes on the slot memory."""

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory
        self.failing: Exception | None = None
        self.told = np.zeros(1, dtype=np.int64)

    def launch(self, step: Step) -> Flight:
        """Computes at once; tokens are told when the engine waits for them, and to the next step before that."""
        ids = step.token_ids
        step = replace(step, token_ids=np.where(ids < 0, self.told[np.maximum(-1 - ids, 0)], ids))
        result = self._run(step)
        self.told = np.resize(result.sampled.token_ids, max(1, len(result.sampled.token_ids)))
        return cast(Flight, Landed(result))

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
