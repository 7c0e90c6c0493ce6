"""A scheduler with its cache and a device without a model, checked before and after every step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.engine.limits import Limits
from octavo.engine.request import FinishReason, Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import Schedule, ScheduledRow, Scheduler
from octavo.kv.manager import KVCacheManager
from octavo.kv.node import Namespace
from tests.engine.slot_memory import Integers, SlotMemory, continuation

VOCABULARY = 97
UNLIMITED = 10**6


class Bench:
    """Requests go in, `step` runs one step on the slot memory and checks everything that must hold."""

    def __init__(self, *, block_size: int = 4, blocks: int = 64, prefix_caching: bool = True, **limits: Any) -> None:
        defaults = {
            "max_input_tokens": UNLIMITED, "max_total_tokens": UNLIMITED, "max_batch_prefill_tokens": UNLIMITED,
        }  # fmt: skip
        self.kv = KVCacheManager(blocks + 1, block_size, prefix_caching)
        self.scheduler = Scheduler(self.kv, Limits(**(defaults | limits)))
        self.memory = SlotMemory(blocks + 1, block_size, VOCABULARY)
        self.requests: list[Request] = []
        self.ended: dict[int, FinishReason] = {}
        self.computed: dict[int, int] = {}
        """Prompt tokens computed for each request, recomputed ones counted again."""

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        end_ids: frozenset[int] = frozenset(),
        namespace: Namespace | None = None,
        **params: Any,
    ) -> Request:
        tokens = np.asarray(prompt, dtype=np.int32)
        request = Request.new(
            len(self.requests), tokens, len(tokens) + max_tokens, SamplingParams(**params), 0, end_ids,
            namespace or Namespace(),
        )  # fmt: skip
        self.scheduler.submit(request)
        self.requests.append(request)
        self.computed[request.id] = 0
        return request

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if request.id not in self.ended]

    def cancel(self, request: Request, insert: bool = True) -> None:
        self.scheduler.cancel(request, insert)
        self.ended[request.id] = FinishReason.CANCELLED
        assert request.table is None
        self.check()

    def step(self, fail: bool = False) -> Schedule:
        """One step; `fail`: its rows die as those of a step that the device did not survive."""
        known = [Before(request, request in self.scheduler.running) for request in self.open]
        schedule = self.scheduler.schedule()
        self._check_schedule(schedule, known)
        if fail:
            for row in schedule.rows:
                self.cancel(row.request, insert=False)
        else:
            self._run(schedule)
        self.check()
        return schedule

    def drain(self) -> None:
        """Step until every request has ended, which the oldest one's progress bounds."""
        for _ in range(2 * sum(request.max_length for request in self.open) + 1):
            if not self.open:
                return
            self.step()
        raise AssertionError(f"{len(self.open)} requests do not end")

    def until(self, condition: Callable[[], bool], limit: int = 1000) -> int:
        """Step until the condition holds; returns the steps taken."""
        for count in range(limit):
            if condition():
                return count
            self.step()
        raise AssertionError(f"still waiting after {limit} steps")

    def is_running(self, request: Request) -> bool:
        return request in self.scheduler.running

    def slots(self, request: Request, start: int, end: int) -> Integers:
        assert request.table is not None
        positions = np.arange(start, end)
        size = self.kv.block_size
        return request.table.blocks[positions // size].astype(np.int64) * size + positions % size

    def _run(self, schedule: Schedule) -> None:
        self.memory.copy(schedule.copies)
        for row in schedule.rows:
            request, end = row.request, row.start + row.count
            slots = self.slots(request, 0, end)
            self.memory.write(slots[row.start :], request.tokens[row.start : end], slots[: row.start])
            self.computed[request.id] += max(0, min(end, request.prompt_length) - row.start)
        tokens = [(row.request, self._read(row)) for row in schedule.rows if row.samples]
        self.scheduler.launched(schedule)
        for request, token in tokens:
            reason = self.scheduler.arrived(request, token)
            if reason is not None:
                self.ended[request.id] = reason
                self._check_answer(request)

    def _read(self, row: ScheduledRow) -> int:
        end = row.start + row.count
        slots = self.slots(row.request, 0, end)
        self.memory.check(slots, row.request.tokens[:end].tolist())
        return self.memory.read(slots)

    def _check_answer(self, request: Request) -> None:
        prompt = request.tokens[: request.prompt_length].tolist()
        assert request.generated.tolist() == continuation(prompt, len(request.generated), VOCABULARY)
        assert request.table is None

    def check(self) -> None:
        """What holds at any time."""
        self.kv.check()
        stats = self.kv.stats()
        assert stats.free + stats.cached + stats.held == stats.total
        waiting, running = self.scheduler.waiting, self.scheduler.running
        for requests in (waiting, running):
            assert [request.id for request in requests] == sorted(request.id for request in requests)
        assert {id(request) for request in self.open} == {id(request) for request in waiting + running}
        assert len(self.open) == len(waiting) + len(running)
        assert all(request.table is None for request in waiting)
        assert all(request.table is not None for request in running)
        if not running:
            assert stats.held == 0

    def _check_schedule(self, schedule: Schedule, known: list["Before"]) -> None:
        rows, limits = schedule.rows, self.scheduler.limits
        assert bool(rows) == bool(known), "a step brings something as long as anything is open"
        assert len({row.request.id for row in rows}) == len(rows)
        assert [row.count == 1 for row in rows] == sorted((row.count == 1 for row in rows), reverse=True)
        assert schedule.decodes == sum(row.count == 1 for row in rows)
        assert len(self.scheduler.running) <= (limits.max_batch_size or UNLIMITED)
        decoding = {before.request.id for before in known if before.ran and before.left == 1}
        prefill = sum(row.count for row in rows if row.request.id not in decoding)
        assert prefill <= limits.max_batch_prefill_tokens
        if limits.counts_decodes:
            assert sum(row.count for row in rows) <= limits.max_batch_prefill_tokens
        self._check_slots(rows)
        self._check_order({row.request.id for row in rows}, known)

    def _check_slots(self, rows: list[ScheduledRow]) -> None:
        written: list[int] = []
        for row in rows:
            table, end, size = row.request.table, row.start + row.count, self.kv.block_size
            assert table is not None
            assert row.start == table.computed
            assert row.count >= 1
            assert end <= row.request.length
            assert table.count * size >= end + self.scheduler.limits.spare_slots
            assert row.start // size >= table.shared, "a shared block is written to"
            written += self.slots(row.request, row.start, end).tolist()
        assert len(set(written)) == len(written), "two tokens go to one slot"
        assert all(slot >= self.kv.block_size for slot in written), "block 0 is written to"

    def _check_order(self, scheduled: set[int], known: list["Before"]) -> None:
        """Those that decode all run; the newest are preempted; newcomers overtake only those that await a prefix."""
        running = {request.id for request in self.scheduler.running}
        preempted = {before.request.id for before in known if before.ran} - running
        admitted = running - {before.request.id for before in known if before.ran}
        assert scheduled >= admitted
        for before in known:
            if before.ran and before.left == 1 and before.request.id in running:
                assert before.request.id in scheduled
        if preempted:
            assert max(running) < min(preempted), "an older request was preempted than one that stays"
        if admitted:
            for before in known:
                if before.request.id not in running and before.request.id < max(admitted):
                    assert self._may_wait(before.request), "a later request overtook one that could run"

    def _may_wait(self, request: Request) -> bool:
        """Does it share a block with a request that is not through with its prompt?"""
        size = self.kv.block_size
        return any(
            request.known[:size].tolist() == leader.known[:size].tolist() and request.namespace == leader.namespace
            for leader in self.scheduler.running
            if leader.computed < leader.length - 1
        )


class Before:
    """A request as it stood before a step."""

    def __init__(self, request: Request, ran: bool) -> None:
        self.request, self.ran = request, ran
        self.left = request.length - request.computed


def prompt_of(length: int, start: int = 0) -> list[int]:
    """A prompt that begins like no other with another start."""
    return [start % VOCABULARY, *[(7 * start + index) % VOCABULARY for index in range(1, length)]]


def settle(bench: Bench) -> None:
    """Let all requests end, and see that each block is free or cached."""
    bench.drain()
    stats = bench.kv.stats()
    assert stats.free + stats.cached == stats.total
    bench.kv.reset()
    assert bench.kv.stats().free == stats.total
