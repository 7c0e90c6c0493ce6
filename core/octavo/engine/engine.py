"""The loop: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.engine.checks import check_ids, checked_prompt
from octavo.engine.observe import Before, Launch, tell_request
from octavo.engine.output import Output
from octavo.engine.request import NO_LABEL, FinishReason, Label, Request
from octavo.engine.runner import Flight, OutOfMemory, Runner, StepResult
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Schedule, Scheduler
from octavo.engine.step import Processed, PromptRow, build
from octavo.engine.uninterrupted import uninterrupted
from octavo.hooks import GrammarRefused, LogitsProcessor, StepStats
from octavo.kv.node import Namespace
from octavo.plugins import Plugins

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Airborne:
    """A step that was launched and whose tokens have not arrived."""

    schedule: Schedule
    prompts: Sequence[PromptRow]
    flight: Flight
    launch: Launch


@dataclass(slots=True)
class Engine:
    """Runs requests step by step. Whoever calls it turns text into tokens and back."""

    scheduler: Scheduler
    runner: Runner
    end_ids: frozenset[int]
    """Tokens that end a sequence unless its request ignores them."""
    vocab_size: int
    plugins: Plugins
    """Those that observe are told of steps and of requests that end."""
    ahead: bool = False
    """Launch each step before the tokens of the one before have arrived, so that the device never waits for Python."""
    on_begin: Callable[[list[int]], None] | None = None
    """Called before a step with the ids of requests that it is the first to run."""
    steps: int = 0
    """That have ended."""
    last_step: StepStats | None = None
    """What the latest step did, and how things stood after it."""
    _requests: dict[int, Request] = field(default_factory=dict)
    _processed: dict[int, Processed] = field(default_factory=dict)
    """Requests with logits processors."""
    _airborne: deque[_Airborne] = field(default_factory=deque)
    """One step between calls, while running ahead; two if somebody broke off in between, such as Ctrl-C."""
    _launching: bool = False
    """Still true after a launch that broke off: the runner may have taken a step that nobody knows of."""
    _outputs: list[Output] = field(default_factory=list)
    """What steps brought, until it is handed out."""
    _landed: list[StepStats] = field(default_factory=list)
    _last_landing: float = 0.0
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def submit(
        self,
        prompt: Sequence[int] | NDArray[np.int64],
        params: SamplingParams,
        *,
        seed: int,
        namespace: Namespace | None = None,
        processors: Sequence[LogitsProcessor] = (),
        label: Label = NO_LABEL,
    ) -> int:
        """Queue one sequence and return its id. Raises RequestRefused, with the numbers, if it can never be served."""
        tokens = checked_prompt(prompt, self.vocab_size)
        check_ids(params, self.vocab_size)
        limits = self.scheduler.limits
        capacity = (self.scheduler.kv.pool.num_blocks - 1) * self.scheduler.kv.block_size - limits.spare_slots
        longest = max(min(limits.max_total_tokens, capacity), len(tokens) + 1)
        max_length = longest if params.max_tokens is None else len(tokens) + params.max_tokens
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        request = Request.new(next(self._ids), tokens, max_length, params, seed, ends, namespace or Namespace(), label)
        self.scheduler.submit(request)
        self._requests[request.id] = request
        if processors:
            self._processed[request.id] = Processed(processors)
        return request.id

    def submit_all(
        self,
        prompt: Sequence[int] | NDArray[np.int64],
        params: SamplingParams,
        *,
        namespace: Namespace | None = None,
        processors: Sequence[Sequence[LogitsProcessor]] = (),
        label: Label = NO_LABEL,
    ) -> list[int]:
        """Queue the `best_of` (or `n`) sequences of a prompt and return their ids; they share the prompt's blocks.

        processors: those of each sequence, which share none: they may remember what they saw.

        Raises RequestRefused, and queues none, if they can never be served.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # The prompt's log-probabilities are the same for all of them: the first one brings them.
        others = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            self.submit(
                prompt, others if index else params, seed=seed + (index << 64), namespace=namespace,
                processors=processors[index] if processors else (), label=label,
            )
            for index in range(params.sequences)
        ]  # fmt: skip

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Forget a request; its blocks are free at once. An id that is unknown, or already ended, is no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.cancel(request)
            self._forget(request, reason)

    def logits_processors(
        self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None
    ) -> list[list[LogitsProcessor]]:
        """The plugins' processors for each of a request's sequences. Raises GrammarRefused."""
        if params.grammar is not None and tokenizer is None:
            raise GrammarRefused("grammar is not for a model that has no tokenizer: leave it out")
        return [self.plugins.logits_processors(params, tokenizer, self.end_ids) for _ in range(params.sequences)]

    @property
    def busy(self) -> bool:
        """Is there anything to run?"""
        return bool(self._requests)

    def step(self) -> list[Output]:
        """Launch a step and give what the last one brought, which on some devices is the step before.

        A step that fails costs its own requests, with the reason, and nobody else's.
        """
        before = Before.of(self.scheduler)
        if not self._may_run_ahead():
            self._land()
        schedule = self.scheduler.schedule()
        if schedule.rows:
            self._tell_begin(schedule, before.time)
            self._launch(schedule, before)
        self._land(leave=1 if self.ahead and schedule.rows else 0)
        if not self._requests:  # what is computed for nobody is not left to whoever comes next
            self._land()
        outputs, self._outputs = self._outputs, []
        return outputs

    def settle(self) -> None:
        """Wait for what runs although nobody waits for it, such as a step whose requests were all cancelled."""
        if not self._requests:
            self._land()

    def take_stats(self) -> list[StepStats]:
        """Of the steps that ended since this was last asked."""
        landed, self._landed = self._landed, []
        return landed

    def _may_run_ahead(self) -> bool:
        """Can the next step be prepared before the tokens of the one that runs are known?"""
        if not self._airborne:
            return True
        waits = any(
            request.pending and (request.params.penalises or request.id in self._processed)
            for request in self.scheduler.running
        )
        return len(self._airborne) == 1 and not (self._launching or waits) and self.scheduler.may_run_ahead()

    def _tell_begin(self, schedule: Schedule, since: float) -> None:
        if self.on_begin is not None:
            newcomers = [row.request.id for row in schedule.rows if (row.request.started or 0) >= since]
            if newcomers:
                self.on_begin(newcomers)

    def _launch(self, schedule: Schedule, before: Before) -> None:
        """Launch it behind the one that runs; if that fails, its requests get what that one brought and then fail."""
        self._launching = True
        try:
            step = build(schedule, self.scheduler.kv.block_size, self._processed)
            flight = self.runner.launch(step)
        except Exception as error:
            self._broken(schedule, before, error)
            return
        launch = Launch.of(self.scheduler, schedule, before)
        with uninterrupted():
            self.scheduler.launched(schedule)
            for wanted in step.prompts:
                schedule.rows[wanted.row].request.prompt_reported += wanted.tokens
            self._airborne.append(_Airborne(schedule, step.prompts, flight, launch))
            self._launching = False

    def _broken(self, schedule: Schedule, before: Before, error: Exception) -> None:
        """A launch failed. One for lack of memory is tried in parts, unless the device has failed altogether."""
        crashed = self._land()
        if isinstance(error, OutOfMemory) and not crashed and self.scheduler.relieve(schedule):
            logger.warning("a step of %d requests did not fit and is tried in parts: %s", len(schedule.rows), error)
            return
        self._fail_all(schedule, error)
        if crashed:
            self.scheduler.kv.reset()
        self._tell_step(Launch.of(self.scheduler, schedule, before))

    def _land(self, leave: int = 0) -> bool:
        """Wait for the steps that run, but for the last `leave`, the oldest first. Says if the device failed at one."""
        while len(self._airborne) > leave:
            landing = self._airborne[0]
            try:
                result = landing.flight.wait()
            except Exception as error:
                self._crash(error)
                return True
            with uninterrupted():
                self._complete(landing, result)
                self._airborne.popleft()
                self._tell_step(landing.launch)
        if not self._airborne:
            self._launching = False
        return False

    def _tell_step(self, launch: Launch) -> None:
        """It has ended: it took the time since it was scheduled, or since the step before ended if that was later."""
        now = time.perf_counter()
        self.steps += 1
        self.last_step = launch.stats(self.scheduler, now - max(launch.began, self._last_landing))
        self._last_landing = now
        self._landed.append(self.last_step)
        self.plugins.step_finished(self.last_step)

    def _complete(self, landing: _Airborne, result: StepResult) -> None:
        """Give the tokens to the requests that are still there: some ended, or were cancelled, after the launch."""
        outputs: dict[int, Output] = {}
        for wanted, logprobs in zip(landing.prompts, result.prompts, strict=True):
            request = landing.schedule.rows[wanted.row].request
            if request.id in self._requests:
                outputs[request.id] = Output.of(request, prompt=logprobs)
        sampling = [row.request for row in landing.schedule.rows if row.samples]
        for due, (request, token) in enumerate(zip(sampling, result.sampled.token_ids.tolist(), strict=True)):
            if request.id not in self._requests:
                continue
            if due in result.sampled.failed:
                outputs[request.id] = self._failed(request, result.sampled.failed[due])
                continue
            output = outputs.setdefault(request.id, Output.of(request))
            output.token_id = token
            output.add_logprobs(request.params, result.sampled, due)
            output.finish_reason = self.scheduler.arrived(request, token)
            if output.finish_reason is not None:
                self._forget(request, output.finish_reason)
        self._outputs += outputs.values()

    def _crash(self, error: Exception) -> None:
        """The device failed at what was launched: nobody knows what it has written of it, nor of what came before."""
        lost = [*self._airborne]
        self._airborne.clear()
        for one in lost:
            self._fail_all(one.schedule, error)
        self.scheduler.kv.reset()
        for one in lost:
            self._tell_step(one.launch)

    def _fail_all(self, schedule: Schedule, error: Exception) -> None:
        """Those of its requests that are still there."""
        fields = {"request_ids": sorted({row.request.label.name for row in schedule.rows})}
        logger.error("a step of %d requests failed", len(schedule.rows), extra={"fields": fields}, exc_info=error)
        failing = [row.request for row in schedule.rows if row.request.id in self._requests]
        self._outputs += [self._failed(request, error) for request in failing]

    def _failed(self, request: Request, error: BaseException) -> Output:
        output = Output.of(request)
        output.finish_reason, output.error = FinishReason.ERROR, f"{type(error).__name__}: {error}"
        self.scheduler.cancel(request, insert=False)
        self._forget(request, FinishReason.ERROR)
        return output

    def _forget(self, request: Request, reason: FinishReason) -> None:
        self._requests.pop(request.id, None)
        self._processed.pop(request.id, None)
        tell_request(self.plugins, request, reason)
