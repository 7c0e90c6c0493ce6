"""Which tokens run next, and who holds blocks for them.

Continuous batching: every step takes one token of each request that decodes, then prompt chunks under a token budget,
in the order of arrival. A request grows by a block when its next token needs one. When none is left, cached prefixes
are evicted, then the newest request is preempted: its blocks go into the prefix tree, so its return recomputes little.
The oldest request always runs, and a request that fits the cache alone is the only kind admitted, so all of them end.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from octavo.engine.leaders import Leaders
from octavo.engine.limits import Limits
from octavo.engine.relief import Relief
from octavo.engine.request import FinishReason, Request
from octavo.kv.budget import blocks_for_tokens
from octavo.kv.manager import KVCacheManager

_ID = attrgetter("id")
_AHEAD = 8
"""Tokens that each running request has room for when another is let in, which would soon be preempted otherwise."""


class RequestRefused(ValueError):
    """A request that can never be served, with the numbers."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """The next `count` tokens of a request, from `start` on."""

    request: Request
    start: int
    count: int
    samples: bool
    """Do these tokens reach the end of what it has, so that the next one is sampled?"""

    @classmethod
    def of(cls, request: Request, start: int, count: int) -> ScheduledRow:
        """As the request stands now."""
        return cls(request, start, count, start + count == request.length)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: rows, those of one token first, and the blocks to copy before."""

    rows: list[ScheduledRow]
    decodes: int
    copies: list[tuple[int, int]]


@dataclass(slots=True)
class Scheduler:
    """Queue, running requests and their blocks. Python and numpy only: it never touches a tensor."""

    kv: KVCacheManager
    limits: Limits
    waiting: list[Request] = field(default_factory=list)
    """In the order of arrival, as is `running`."""
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0
    _waited: int = 0
    """Decode steps since newcomers were last let in."""
    _relief: Relief = field(default_factory=Relief)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused, with the numbers, for one that can never be served."""
        self._check(request)
        bisect.insort(self.waiting, request, key=_ID)

    def _check(self, request: Request) -> None:
        limits, prompt = self.limits, request.prompt_length
        if prompt > limits.max_input_tokens:
            raise RequestRefused(
                f"the prompt has {prompt} tokens, the limit is {limits.max_input_tokens} (max_input_tokens): shorten it"
            )
        if request.max_length > limits.max_total_tokens:
            raise RequestRefused(
                f"{prompt} prompt tokens and {request.max_length - prompt} new ones (max_tokens) are "
                f"{request.max_length}, the limit is {limits.max_total_tokens} (max_total_tokens): "
                f"ask for at most {limits.max_total_tokens - prompt}"
            )
        needed = blocks_for_tokens(request.max_length + limits.spare_slots, self.kv.block_size)
        if needed > self.kv.pool.num_blocks - 1:
            raise RequestRefused(
                f"{request.max_length} tokens need {needed} blocks of {self.kv.block_size}, the whole cache has "
                f"{self.kv.pool.num_blocks - 1}: ask for fewer tokens or raise max_batch_total_tokens"
            )

    def cancel(self, request: Request, insert: bool = True) -> None:
        """Forget a request, wherever it is; its blocks are free, or cached for others, at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._stop(request, insert)

    def schedule(self) -> Schedule:
        """Choose the next step's rows and give them their blocks. Empty when nothing can run."""
        rows, budget = self._continue()
        rows += self._admit(budget, decoding=any(row.count == 1 for row in rows))
        rows.sort(key=lambda row: row.count > 1)
        return Schedule(rows, sum(row.count == 1 for row in rows), self.kv.copies)

    def _continue(self) -> tuple[list[ScheduledRow], int]:
        """Running requests, oldest first, and the budget they leave; those that find no block preempt the newest."""
        rows: list[ScheduledRow] = []
        budget = self._budget
        position = 0
        while position < len(self.running):
            request = self.running[position]
            count, left = _next_tokens(request, budget)
            if count and not self._grow(request, count):
                self._preempt(self.running[-1])
                continue
            if count:
                rows.append(ScheduledRow.of(request, request.computed, count))
            budget, position = left, position + 1
        return rows, budget

    def _admit(self, budget: int, decoding: bool) -> Iterator[ScheduledRow]:
        """Newcomers in the order of arrival, as long as tokens, blocks and places last."""
        if (decoding and self._patience()) or not self.waiting:
            return
        leaders = Leaders(self.kv.block_size, self.running)
        reserved = sum(map(self._soon, self.running))
        for request in list(self.waiting):
            if budget < 1 or len(self.running) == self.limits.max_batch_size or self._relief.is_full(len(self.running)):
                return
            if self._awaits(request, leaders):
                continue
            row = self._admit_one(request, budget, reserved)
            if row is None:
                return
            leaders.add(request)
            reserved += self._soon(request)
            budget -= row.count
            yield row

    def _admit_one(self, request: Request, budget: int, reserved: int) -> ScheduledRow | None:
        """Let it in with its first tokens; None if tokens do not suffice, or blocks beside `reserved` ones."""
        spare = self.limits.spare_slots
        table = request.table = self.kv.admit(request.known, request.namespace, request.uses_cache, spare, reserved)
        left = request.length - table.computed
        count = min(left, budget)
        too_long = self.limits.whole_prompts and count < left
        if too_long or not (self._has_room(request, reserved) and self._grow(request, count)):
            self._release(request)
            return None
        if request.cached_tokens is None:
            request.cached_tokens, request.started = table.computed, time.perf_counter()
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_ID)
        self._waited = 0
        return ScheduledRow.of(request, table.computed, count)

    def _patience(self) -> bool:
        """Do newcomers wait a little more, so that those that decode are interrupted less often?"""
        ratio, most = self.limits.waiting_served_ratio, self.limits.max_waiting_tokens
        if ratio is None:
            return False
        self._waited += 1
        enough = len(self.waiting) >= int(ratio * len(self.running))
        return not enough and (most is None or self._waited < most)

    def _awaits(self, request: Request, leaders: Leaders) -> bool:
        """Is a longer prefix of it than is cached being computed right now? Then it waits a step and shares it."""
        if not (self.kv.prefix_caching and request.uses_cache):
            return False
        longest = leaders.shared(request)
        return longest > 0 and longest > self.kv.peek(request.known, request.namespace)

    def _soon(self, request: Request) -> int:
        """Blocks that a running request will ask for within its next tokens."""
        assert request.table is not None, "a running request has a table"
        tokens = min(request.length + _AHEAD, request.max_length) + self.limits.spare_slots
        return blocks_for_tokens(tokens, self.kv.block_size) - request.table.count

    def _has_room(self, request: Request, reserved: int) -> bool:
        """Room for all of it that is known, beside what those that run will soon ask for."""
        if not self.running or request.table is None:
            return True
        needed = blocks_for_tokens(request.length + self.limits.spare_slots, self.kv.block_size) - request.table.count
        return needed + reserved <= self.kv.available

    def _grow(self, request: Request, count: int) -> bool:
        assert request.table is not None, "a running request has a table"
        return self.kv.grow(request.table, request.computed + count + self.limits.spare_slots)

    def _preempt(self, request: Request) -> None:
        assert not request.pending, "nobody runs ahead where requests may be preempted"
        self.preemptions += 1
        request.preemptions += 1
        self._stop(request)
        bisect.insort(self.waiting, request, key=_ID)

    def _stop(self, request: Request, insert: bool = True) -> None:
        self.running.remove(request)
        self._release(request, insert)

    def _release(self, request: Request, insert: bool = True) -> None:
        table = request.table
        assert table is not None, "a running request has a table"
        request.drop_pending()
        table.computed = min(table.computed, request.length)
        self.kv.release(table, request.known, insert)
        request.table = None

    def may_run_ahead(self) -> bool:
        """Is there a block for each token that runs next, so that no request must be preempted?

        A request whose last token is yet to arrive cannot be: nobody could say what is to be computed again.
        """
        needed, budget, size, spare = 0, self._budget, self.kv.block_size, self.limits.spare_slots
        if self.kv.available > len(self.running) + budget // size:  # that much would do for any, and is the usual case
            return True
        for request in self.running:
            assert request.table is not None, "a running request has a table"
            count, budget = _next_tokens(request, budget)
            needed += max(0, blocks_for_tokens(request.computed + count + spare, size) - request.table.count)
        return needed <= self.kv.available

    @property
    def _budget(self) -> int:
        """Prompt tokens of the next step."""
        most = self.limits.max_batch_prefill_tokens
        if self.limits.counts_decodes:
            most -= sum(_next_tokens(request, 0)[0] for request in self.running)
        return self._relief.tokens(most)

    def relieve(self, schedule: Schedule) -> bool:
        """A step did not fit into the device's memory: make the next ones smaller. False if they cannot be."""
        prompts = sum(row.count for row in schedule.rows if row.count > 1)
        if self.limits.whole_prompts or (prompts < 2 and len(self.running) < 2):
            return False
        if prompts > 1:
            self._relief = Relief(chunk=prompts // 2, rows=self._relief.rows)
            return True
        # Without prompts it is the number of requests: the newest half waits.
        for request in self.running[-(len(self.running) // 2) :]:
            self.preemptions += 1
            request.preemptions += 1
            self._stop(request, insert=False)
            bisect.insort(self.waiting, request, key=_ID)
        self._relief = Relief(chunk=self._relief.chunk, rows=len(self.running))
        return True

    def launched(self, schedule: Schedule) -> None:
        """The rows are being computed: what is launched next comes after them."""
        self._relief.calm()
        self.kv.take_copies()
        sampling = 0
        for row in schedule.rows:
            request, table = row.request, row.request.table
            assert table is not None, "a scheduled request has a table"
            table.computed = row.start + row.count
            if table.computed <= request.prompt_length or row.count > 1:
                self.kv.commit(table, request.known)
            if row.samples:
                request.expect(sampling)
                sampling += 1

    def arrived(self, request: Request, token: int) -> FinishReason | None:
        """The next token of a request that waits for one. Says if the request ended."""
        reason = request.arrive(token)
        if reason is not None:
            self._stop(request)
        return reason


def _next_tokens(request: Request, budget: int) -> tuple[int, int]:
    """How many tokens of a running request come next, and what they leave of the prompts' budget."""
    left = 0 if request.is_complete else request.length - request.computed
    if left <= 1:
        return left, budget
    count = min(left, budget)
    return count, budget - count
