"""What is told of steps and of requests, to whoever observes."""

from __future__ import annotations

import time
from typing import NamedTuple

from octavo.engine.request import FinishReason, Request
from octavo.engine.scheduler import Schedule, Scheduler
from octavo.hooks import RequestSummary, StepStats
from octavo.plugins import Plugins


class Before(NamedTuple):
    """How things stood when a step began."""

    time: float
    """Of the clock time.perf_counter."""
    preemptions: int
    evictions: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> Before:
        """Now."""
        return cls(time.perf_counter(), scheduler.preemptions, scheduler.kv.stats().evictions)


class Launch(NamedTuple):
    """What a step computes, known when it is launched."""

    began: float
    """When it was scheduled, by the clock time.perf_counter."""
    prefill_tokens: int
    decode_tokens: int
    preempted: int
    evicted: int

    @classmethod
    def of(cls, scheduler: Scheduler, schedule: Schedule, before: Before) -> Launch:
        """Of a step that was just scheduled."""
        prefill = [row.count for row in schedule.rows if row.start < row.request.prompt_length]
        return cls(
            before.time,
            sum(prefill),
            len(schedule.rows) - len(prefill),
            scheduler.preemptions - before.preemptions,
            scheduler.kv.stats().evictions - before.evictions,
        )

    def stats(self, scheduler: Scheduler, seconds: float) -> StepStats:
        """Now that it is over, and how things stand."""
        cache = scheduler.kv.stats()
        return StepStats(
            seconds=seconds,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=self.preempted,
            free_blocks=cache.free,
            cached_blocks=cache.cached,
            held_blocks=cache.held,
            evicted_blocks=self.evicted,
        )


def tell_request(plugins: Plugins, request: Request, reason: FinishReason) -> None:
    """A request has ended."""
    if not plugins.watched("octavo_request_finished"):
        return
    now = time.perf_counter()
    plugins.request_finished(
        RequestSummary(
            request_id=request.id,
            finish_reason=reason.value,
            prompt_tokens=request.prompt_length,
            cached_tokens=request.cached_tokens or 0,
            generated_tokens=request.length - request.prompt_length,
            preemptions=request.preemptions,
            first_token_seconds=None if request.first_token is None else request.first_token - request.submitted,
            seconds=now - request.submitted,
            queue_seconds=None if request.started is None else request.queue_seconds,
            sequences=request.params.sequences,
            label=request.label.name,
            trace=request.label.trace,
        )
    )
