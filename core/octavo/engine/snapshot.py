"""Numbers and pictures of a running engine, worked out when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.messages import BLOCK_STATES, ActiveRequest, CacheNode, CacheSnapshot, EngineStats
from octavo.engine.request import Request
from octavo.hooks import StepStats
from octavo.kv.node import Node

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

_SHOWN_TOKENS = 48  # of each node and request; siblings differ within a block
_SCRATCH, _FREE, _CACHED, _PINNED, _HELD = range(len(BLOCK_STATES))


@dataclass(slots=True)
class Totals:
    """What all steps did together."""

    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def add(self, step: StepStats) -> None:
        """One more step."""
        self.seconds += step.seconds
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += step.decode_tokens

    def stats(self, engine: Engine, ticket: int) -> EngineStats:
        """The numbers as they stand."""
        cache, scheduler = engine.scheduler.kv.stats(), engine.scheduler
        return EngineStats(
            ticket=ticket,
            blocks_total=cache.total,
            blocks_free=cache.free,
            blocks_cached=cache.cached,
            blocks_held=cache.held,
            blocks_pinned=cache.pinned,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            evicted_blocks=cache.evictions,
            hit_tokens=cache.hit_tokens,
            queried_tokens=cache.queried_tokens,
            preemptions=scheduler.preemptions,
            steps=engine.steps,
            step_seconds=self.seconds,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            last_step=engine.last_step,
        )


def snapshot(engine: Engine, totals: Totals, ticket: int, most: int) -> CacheSnapshot:
    """Every block's state, the `most` nodes of the prefix tree used last, and as many requests.

    Its cost grows with blocks and nodes, those left out too; the answer says what it was.
    """
    started = thread_time()
    scheduler = engine.scheduler
    kv, now = scheduler.kv, monotonic()
    nodes = [node for node in kv.tree.nodes() if node.parent is not None]
    # A node was used no later than its parent, and equals keep their order: parents are shown before their children.
    idle = {node: 0.0 if node.locks else now - node.used for node in nodes}
    places = {node: place for place, node in enumerate(nsmallest(most, nodes, key=idle.__getitem__))}
    requests = list(islice((*scheduler.running, *scheduler.waiting), most))

    states = np.full(kv.pool.num_blocks, _HELD, np.uint8)
    states[0], states[kv.pool.free_blocks()] = _SCRATCH, _FREE
    seconds, owners = np.zeros(states.size, "<f4"), np.full(states.size, -1, "<i4")
    if nodes:
        blocks, sizes = np.concatenate([node.blocks for node in nodes]), [node.blocks.size for node in nodes]
        states[blocks] = np.repeat([_PINNED if node.locks else _CACHED for node in nodes], sizes)
        seconds[blocks] = np.repeat([idle[node] for node in nodes], sizes)
        owners[blocks] = np.repeat([places.get(node, -1) for node in nodes], sizes)
    for place, request in enumerate(requests):
        if request.table is not None:
            owners[request.table.blocks[request.table.shared :]] = -2 - place
    return CacheSnapshot(
        ticket=ticket,
        stats=totals.stats(engine, ticket),
        states=states.tobytes(),
        idle_seconds=seconds.tobytes(),
        owners=owners.tobytes(),
        nodes=[_node(node, places, idle[node]) for node in places],
        nodes_left_out=len(nodes) - len(places),
        requests=[_request(request, places) for request in requests],
        seconds=thread_time() - started,
    )


def _node(node: Node, places: Mapping[Node, int], idle_seconds: float) -> CacheNode:
    return CacheNode(
        parent=_place(node.parent, places),
        tokens=node.tokens.size,
        blocks=node.blocks.size,
        locks=node.locks,
        idle_seconds=idle_seconds,
        first_tokens=node.tokens[:_SHOWN_TOKENS].tolist(),
        tenant=node.namespace.tenant,
        adapter=node.namespace.adapter,
    )


def _request(request: Request, places: Mapping[Node, int]) -> ActiveRequest:
    table = request.table
    return ActiveRequest(
        id=request.id,
        running=table is not None,
        prompt_tokens=request.prompt_length,
        cached_tokens=request.cached_tokens or 0,
        computed_tokens=request.computed,
        tokens=len(request.known),
        most_tokens=request.max_length,
        blocks=0 if table is None else table.count,
        node=-1 if table is None else _place(table.node, places),
        seconds=perf_counter() - request.submitted,
        last_tokens=request.known[-_SHOWN_TOKENS:].tolist(),
        tenant=request.namespace.tenant,
    )


def _place(node: Node | None, places: Mapping[Node, int]) -> int:
    """Of the nearest node that is shown, from this one up; -1: none."""
    return next((places[above] for above in _upwards(node) if above in places), -1)


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
