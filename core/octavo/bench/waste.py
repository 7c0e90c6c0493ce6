"""How much of a cache is reserved but holds nothing: three ways to reserve slots, on the same conversations.

No model runs. All requests wait from the start and are admitted in their order; a step gives each running request its
next token, or as much of its prompt as the step's budget of prompt tokens allows. What is counted, at the end of each
step for as long as requests wait: the slots that requests hold, and those of them that keys and values are written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean

import numpy as np

from octavo.bench.exchange import Exchange
from octavo.bench.machine import Fact, machine
from octavo.bench.report import Report
from octavo.engine.limits import Limits
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Schedule, Scheduler
from octavo.kv.budget import blocks_for_tokens
from octavo.kv.manager import KVCacheManager
from octavo.kv.node import Namespace

CONTIGUOUS, UP_FRONT, OCTAVO = "contiguous", "up front", "octavo"

_END = 2**31 - 1
"""A token id that no vocabulary has: the dummy answers end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The same for every way of reserving."""

    cache_tokens: int
    """Slots in all: what the bytes hold."""
    max_total_tokens: int
    """Of one request, prompt and answer: what a contiguous reservation is made for."""
    max_new_tokens: int
    """What each client asks for, whatever the answer turns out to need."""
    max_batch_prefill_tokens: int


@dataclass(slots=True)
class Tally:
    """What is counted, step by step."""

    unused_shares: list[float] = field(default_factory=list)
    """Of the slots that requests hold, those without keys and values."""
    used: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    steps: int = 0
    """All of them, those after the last request was admitted too."""

    def add(self, reserved: int, used: int, running: int) -> None:
        """One step while requests wait; slots that requests share count once."""
        self.unused_shares.append(1 - used / reserved)
        self.used.append(used)
        self.running.append(running)

    @property
    def requests_at_once(self) -> float:
        """Mean over the counted steps. Raises ValueError if there are none."""
        if not self.running:
            raise ValueError("the cache never made a request wait: use more requests or a smaller cache")
        return mean(self.running)

    def row(self, reservation: str, block_size: int | None, cache: Cache) -> dict[str, Fact]:
        """The averages over the counted steps."""
        at_once = self.requests_at_once
        return {
            "reservation": reservation,
            "block_size_tokens": block_size,
            "unused_percent": round(100 * mean(self.unused_shares), 3),
            "used_percent_of_cache": round(100 * mean(self.used) / cache.cache_tokens, 2),
            "running_requests": round(at_once, 2),
            "steps": self.steps,
        }


@dataclass(slots=True)
class _Held:
    """A request that runs in slots reserved for all of it."""

    reserved: int
    prompt: int
    last: int
    """Slots written when its answer is complete: the last token's keys and values are never needed."""
    written: int = 0


def reserve_ahead(exchanges: Sequence[Exchange], slots: Callable[[Exchange], int], room: int, budget: int) -> Tally:
    """Requests that reserve `slots` of `room` before they run, and give them back when they end."""
    waiting = deque(
        _Held(slots(each), len(each.prompt), len(each.prompt) + each.answer_tokens - 1) for each in exchanges
    )
    tallest = max(each.reserved for each in waiting)
    if tallest > room:
        raise ValueError(f"one request reserves {tallest} slots and the cache has {room}: use a larger cache")
    running: list[_Held] = []
    tally, reserved = Tally(), 0
    while running or waiting:
        left = budget
        for held in running:
            left -= _advance(held, left)
        while waiting and left and reserved + waiting[0].reserved <= room:
            held = waiting.popleft()
            running.append(held)
            reserved += held.reserved
            left -= _advance(held, left)
        tally.steps += 1
        if waiting:
            tally.add(reserved, sum(held.written for held in running), len(running))
        reserved -= sum(held.reserved for held in running if held.written == held.last)
        running = [held for held in running if held.written < held.last]
    return tally


def _advance(held: _Held, budget: int) -> int:
    """Write its next token, or its prompt as far as the budget goes; gives what that takes of the budget."""
    if held.written >= held.prompt:
        held.written += 1
        return 0
    count = min(held.prompt - held.written, budget)
    held.written += count
    return count


def contiguous(exchanges: Sequence[Exchange], cache: Cache) -> Tally:
    """One piece of max_total_tokens slots for each request."""
    return reserve_ahead(
        exchanges, lambda _: cache.max_total_tokens, cache.cache_tokens, cache.max_batch_prefill_tokens
    )


def up_front(exchanges: Sequence[Exchange], cache: Cache, block_size: int) -> Tally:
    """Blocks for the prompt and for all that the client asked for, as TGI's router takes them; block 0 is nobody's."""

    def slots(exchange: Exchange) -> int:
        return blocks_for_tokens(len(exchange.prompt) + cache.max_new_tokens - 1, block_size) * block_size

    room = (cache.cache_tokens // block_size - 1) * block_size
    return reserve_ahead(exchanges, slots, room, cache.max_batch_prefill_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """What octavo's own scheduler did."""

    tally: Tally
    preemptions: int
    """How often, requests that were preempted several times included."""
    recomputed_tokens: int
    """Tokens whose keys and values were computed before, and lost to eviction after a preemption."""
    cached_tokens: int
    """Prompt tokens found in the cache."""


def octavo(exchanges: Sequence[Exchange], cache: Cache, block_size: int) -> Served:
    """octavo's scheduler and block cache as they serve, with dummy tokens in a model's place."""
    kv = KVCacheManager(cache.cache_tokens // block_size, block_size)
    limits = Limits(
        max_input_tokens=cache.max_total_tokens - 1,
        max_total_tokens=cache.max_total_tokens,
        max_batch_prefill_tokens=cache.max_batch_prefill_tokens,
    )
    scheduler = Scheduler(kv, limits)
    requests = list(_requests(exchanges, cache.max_new_tokens))
    for request in requests:
        scheduler.submit(request)
    tally, computed = Tally(), 0
    while scheduler.waiting or scheduler.running:
        schedule = scheduler.schedule()
        kv.take_copies()  # made at once here: their originals are nobody's from now on
        tally.steps += 1
        computed += sum(row.count for row in schedule.rows)
        if scheduler.waiting:
            tally.add(kv.stats().held * block_size, _written(scheduler, schedule), len(scheduler.running))
        _complete(scheduler, schedule, exchanges)
    found = sum(request.cached_tokens or 0 for request in requests)
    needed = sum(len(each.prompt) + each.answer_tokens - 1 for each in exchanges)
    return Served(tally, scheduler.preemptions, computed - (needed - found), found)


def _requests(exchanges: Sequence[Exchange], max_new_tokens: int) -> Iterator[Request]:
    params, ends, namespace = SamplingParams(max_tokens=max_new_tokens), frozenset([_END]), Namespace()
    for number, exchange in enumerate(exchanges):
        prompt = np.asarray(exchange.prompt, dtype=np.int32)
        yield Request.new(number, prompt, len(prompt) + max_new_tokens, params, 0, ends, namespace)


def _complete(scheduler: Scheduler, schedule: Schedule, exchanges: Sequence[Exchange]) -> None:
    """Give each request that is due a token that nobody else has, the last one its end."""
    scheduler.launched(schedule)
    for request in [row.request for row in schedule.rows if row.samples]:
        last = request.length - request.prompt_length == exchanges[request.id].answer_tokens
        scheduler.arrived(request, _END if last else _END - 1 - request.id)


def _written(scheduler: Scheduler, schedule: Schedule) -> int:
    """Slots with keys and values at the end of a step, of running requests, shared blocks once.

    Blocks of the tree that are in use are full. A request's own blocks hold what it wrote behind those.
    """
    block_size = scheduler.kv.block_size
    after = {row.request.id: row.start + row.count for row in schedule.rows}
    shared = scheduler.kv.stats().pinned * block_size
    own = 0
    for request in scheduler.running:
        assert request.table is not None, "a running request has a table"
        own += after.get(request.id, request.computed) - request.table.shared * block_size
    return shared + own


def rows(exchanges: Sequence[Exchange], cache: Cache, block_sizes: Sequence[int]) -> list[dict[str, Fact]]:
    """A row for each way of reserving and each block size. Raises ValueError if the cache fits no request, or all."""
    whole = contiguous(exchanges, cache)
    found = [whole.row(CONTIGUOUS, None, cache)]
    for block_size in block_sizes:
        ahead, served = up_front(exchanges, cache, block_size), octavo(exchanges, cache, block_size)
        for name, tally in ((UP_FRONT, ahead), (OCTAVO, served.tally)):
            found.append(tally.row(name, block_size, cache))
            found[-1]["running_requests_ratio_to_contiguous"] = round(
                tally.requests_at_once / whole.requests_at_once, 3
            )
            found[-1]["running_requests_ratio_to_up_front"] = round(tally.requests_at_once / ahead.requests_at_once, 3)
        found[-1] |= {
            "preemptions": served.preemptions,
            "recomputed_tokens": served.recomputed_tokens,
            "cached_tokens": served.cached_tokens,
        }
    return found


def report(exchanges: Sequence[Exchange], cache: Cache, block_sizes: Sequence[int], **workload: Fact) -> Report:
    """The rows, with what they were made from; `workload` says where the exchanges come from."""
    where = machine()
    means = {
        "mean_prompt_tokens": round(mean(len(exchange.prompt) for exchange in exchanges), 1),
        "mean_answer_tokens": round(mean(exchange.answer_tokens for exchange in exchanges), 1),
    }
    said = {"requests": len(exchanges), **workload, **means, **asdict(cache)}
    return Report(bench="waste", machine=where, workload=said, rows=rows(exchanges, cache, block_sizes))
