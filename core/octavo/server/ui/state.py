"""What the page shows: the engine's snapshot, and of it only what belongs to whoever looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.async_engine import BLOCK_STATES, CacheSnapshot, EngineDied, EngineStats
from octavo.server.service import Service

FRESH_SECONDS = 0.2
"""All pages together ask the engine no more often than this ..."""
SHARE = 0.01
"""... and take no more than this share of its time."""
_MOST = 500
"""Nodes and requests."""


class PageNode(msgspec.Struct):
    """A run of tokens in the prefix tree."""

    parent: int
    """Its place in the list; -1: none above it is shown."""
    text: str
    """What it begins with."""
    tokens: int
    blocks: int
    locks: int
    """Requests that use it, or a node below it."""
    idle_seconds: float


class PageRequest(msgspec.Struct):
    """A sequence that runs or waits."""

    id: int
    text: str
    """What it ends with, so far."""
    running: bool
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    tokens: int
    """Of prompt and answer, so far."""
    most_tokens: int
    blocks: int
    node: int
    """The node in which its shared blocks end; -1: none."""
    seconds: float


class Others(msgspec.Struct):
    """What belongs to other API keys."""

    nodes: int = 0
    requests: int = 0


class Cache(msgspec.Struct):
    """The cache at one moment."""

    stats: EngineStats
    states: list[str]
    """What the states in `runs` are called."""
    runs: list[tuple[int, int, int, float]]
    """Blocks 1, 2, ... in runs of equals: how many, state, owner, idle seconds. An owner is a place in `nodes`, or
    -2 - a place in `requests`, or -1."""
    nodes: list[PageNode]
    nodes_left_out: int
    requests: list[PageRequest]
    others: Others


class PageState(msgspec.Struct):
    """The server, and its cache."""

    model: str
    backend: str
    version: str
    block_size: int
    can_chat: bool
    """Has the model a chat template?"""
    most_answers: int
    """To one prompt."""
    trouble: str
    """Why the engine does not answer; empty while it does."""
    time: float
    """When the cache looked so, seconds of a clock that only goes forward."""
    cache: Cache | None
    """The latest one known."""


class Viewer:
    """Asks the engine for all pages that are open, and for none if none is."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asking = asyncio.Lock()
        self._snapshot: CacheSnapshot | None = None
        self._caches: dict[str, Cache] = {}
        """What each tenant sees of it: many pages, and many questions of one, are told the same."""
        self._taken = self._fresh_until = 0.0
        self._trouble = ""
        self._cached_text = lru_cache(maxsize=4 * _MOST)(self._decode)

    async def state(self, tenant: str) -> PageState:
        """As this tenant may see it."""
        async with self._asking:
            if time.monotonic() >= self._fresh_until:
                await self._ask()
        info, snapshot = self._service.engine.info, self._snapshot
        if snapshot is not None and tenant not in self._caches:
            self._caches[tenant] = self._cache(snapshot, tenant)
        return PageState(
            model=info.model,
            backend=info.backend,
            version=info.version,
            block_size=info.block_size,
            can_chat=self._service.texts.has_chat_template,
            most_answers=self._service.settings.max_best_of,
            trouble=self._trouble,
            time=self._taken,
            cache=self._caches.get(tenant),
        )

    async def _ask(self) -> None:
        try:
            self._snapshot, self._caches = await self._service.engine.snapshot(_MOST), {}
        except EngineDied as error:
            self._trouble = str(error)
        except TimeoutError:
            self._trouble = "the engine is in a long step"
        else:
            self._trouble = ""
            self._taken = time.monotonic()
        cost = 0.0 if self._snapshot is None else self._snapshot.seconds
        self._fresh_until = time.monotonic() + max(FRESH_SECONDS, cost / SHARE)

    def _cache(self, snapshot: CacheSnapshot, tenant: str) -> Cache:
        own_nodes = [place for place, node in enumerate(snapshot.nodes) if node.tenant == tenant]
        own_requests = [place for place, request in enumerate(snapshot.requests) if request.tenant == tenant]
        # Owners as they are numbered here; a negative one counts from the end, and the last entry is -1's.
        renumbered = np.full(len(snapshot.nodes) + len(snapshot.requests) + 1, -1, np.int32)
        renumbered[own_nodes] = np.arange(len(own_nodes))
        renumbered[[-2 - place for place in own_requests]] = -2 - np.arange(len(own_requests))
        return Cache(
            stats=snapshot.stats,
            states=list(BLOCK_STATES),
            runs=_runs(snapshot, renumbered),
            nodes=[self._node(snapshot, place, renumbered) for place in own_nodes],
            nodes_left_out=snapshot.nodes_left_out,
            requests=[self._request(snapshot, place, renumbered) for place in own_requests],
            others=Others(
                len(snapshot.nodes) - len(own_nodes),
                snapshot.stats.running + snapshot.stats.waiting - len(own_requests),
            ),
        )

    def _node(self, snapshot: CacheSnapshot, place: int, renumbered: NDArray[np.int32]) -> PageNode:
        node = snapshot.nodes[place]
        return PageNode(
            parent=int(renumbered[node.parent]),
            text=self._cached_text(tuple(node.first_tokens)),
            tokens=node.tokens,
            blocks=node.blocks,
            locks=node.locks,
            idle_seconds=round(node.idle_seconds, 1),
        )

    def _request(self, snapshot: CacheSnapshot, place: int, renumbered: NDArray[np.int32]) -> PageRequest:
        request = snapshot.requests[place]
        return PageRequest(
            id=request.id,
            text=self._decode(request.last_tokens),
            running=request.running,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            computed_tokens=request.computed_tokens,
            tokens=request.tokens,
            most_tokens=request.most_tokens,
            blocks=request.blocks,
            node=int(renumbered[request.node]),
            seconds=round(request.seconds, 2),
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens too; a model without a tokenizer shows its token ids."""
        tokenizer = self._service.engine.tokenizer
        return str(tokenizer.decode(list(token_ids))) if tokenizer is not None else " ".join(map(str, token_ids))


def _runs(snapshot: CacheSnapshot, renumbered: NDArray[np.int32]) -> list[tuple[int, int, int, float]]:
    states = np.frombuffer(snapshot.states, np.uint8)[1:]  # block 0 is nobody's
    owners = renumbered[np.frombuffer(snapshot.owners, "<i4")[1:]]
    idle = np.frombuffer(snapshot.idle_seconds, "<f4")[1:].round()
    differs = (np.diff(states) != 0) | (np.diff(owners) != 0) | (np.diff(idle) != 0)
    starts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    counts = np.diff(starts, append=states.size)
    return list(
        zip(counts.tolist(), states[starts].tolist(), owners[starts].tolist(), idle[starts].tolist(), strict=True)
    )
