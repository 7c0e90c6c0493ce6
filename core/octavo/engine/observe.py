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


def step_stats(scheduler: Scheduler, schedule: Schedule, before: Before) -> StepStats:
    """Of a step that is over."""
    cache = scheduler.kv.stats()
    prefill = [row.count for row in schedule.rows if row.start < row.request.prompt_length]
    return StepStats(
        seconds=time.perf_counter() - before.time,
        prefill_tokens=sum(prefill),
        decode_tokens=len(schedule.rows) - len(prefill),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preempted=scheduler.preemptions - before.preemptions,
        free_blocks=cache.free,
        cached_blocks=cache.cached,
        held_blocks=cache.held,
        evicted_blocks=cache.evictions - before.evictions,
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
