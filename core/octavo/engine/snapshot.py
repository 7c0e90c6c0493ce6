"""Numbers and pictures of a running engine, worked out when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.messages import BLOCK_STATES, CacheNode, CacheSnapshot, EngineStats
from octavo.hooks import StepStats
from octavo.kv.manager import KVCacheManager
from octavo.kv.node import Node

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

_SHOWN_TOKENS = 16  # of each node


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


def snapshot(kv: KVCacheManager, ticket: int, most_nodes: int) -> CacheSnapshot:
    """Every block's state, and `most_nodes` nodes of the prefix tree; costs a microsecond or two for each node."""
    states = np.full(kv.pool.num_blocks, BLOCK_STATES.index("held"), np.uint8)
    idle = np.zeros(kv.pool.num_blocks, "<f4")
    states[0] = BLOCK_STATES.index("scratch")
    states[kv.pool.free_blocks()] = BLOCK_STATES.index("free")
    now = monotonic()
    places: dict[Node, int] = {}
    shown: list[CacheNode] = []
    left_out = 0
    for node in kv.tree.nodes():
        states[node.blocks] = BLOCK_STATES.index("pinned" if node.locks else "cached")
        seconds = 0.0 if node.locks or node.parent is None else now - node.used
        idle[node.blocks] = seconds
        if len(shown) == most_nodes:
            left_out += 1
        else:
            places[node] = len(shown)
            shown.append(
                CacheNode(
                    parent=-1 if node.parent is None else places[node.parent],
                    tokens=node.tokens.size,
                    blocks=node.blocks.size,
                    locks=node.locks,
                    idle_seconds=seconds,
                    first_tokens=node.tokens[:_SHOWN_TOKENS].tolist(),
                    tenant=node.namespace.tenant,
                    adapter=node.namespace.adapter,
                )
            )
    return CacheSnapshot(
        ticket=ticket,
        states=states.tobytes(),
        idle_seconds=idle.tobytes(),
        nodes=shown,
        nodes_left_out=left_out,
    )
