"""How many blocks the cache has, and what that allows: from settings, free memory, and a measured step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from octavo.attention.device import Device
from octavo.attention.select import Selection
from octavo.engine.fixed import ALIGNED
from octavo.engine.graphs import ladder
from octavo.engine.limits import Limits
from octavo.engine.runner import Runner
from octavo.engine.warm_up import Worst, activations
from octavo.kv.budget import blocks_for_bytes, blocks_for_tokens, refusal
from octavo.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

_USUAL_ROWS = 256
"""Sequences at once without `MAX_BATCH_SIZE`: requests may have several, and `octavo.LLM` limits none."""
_CHUNK, _CHUNK_OF_GPUS = 4096, 8192
"""Prompt tokens of a step without `MAX_BATCH_PREFILL_TOKENS`. A GPU takes them in less time than a CPU takes a few."""
_FIXED = 256
"""The same of a deterministic step, which always has as many: about those that a GPU takes while it reads weights."""
CPU_SHARE = 0.25
"""Of the free host memory that the cache may take when the user names no size: the machine has others to serve."""


@dataclass(frozen=True, slots=True)
class Room:
    """A device's memory once the model is there, and what a block of the cache takes of it."""

    device: str
    free: int
    """Bytes."""
    block_size: int
    """Tokens."""
    block_bytes: int
    """Of one block in all layers together."""
    activations: int = 0
    """Bytes that a step wants at most."""
    graphs: int = 0
    """Bytes that captured steps keep."""

    def blocks(self, settings: Settings) -> int:
        """Blocks of the cache, block 0 included: what the user asks for, or what memory holds beside a step.

        Raises SettingsError, with the most that fits, if it is too much.
        """
        left = self.free - self.activations - self.graphs
        if settings.max_batch_total_tokens is None:
            share = CPU_SHARE if self.device == "cpu" else 1
            return blocks_for_bytes(int(left * share * settings.tgi_wiggle_room), self.block_bytes)
        num_blocks = blocks_for_tokens(settings.max_batch_total_tokens, self.block_size) + 1
        if num_blocks * self.block_bytes > left:
            most = (blocks_for_bytes(left, self.block_bytes) - 1) * self.block_size
            source = settings.sources.get("max_batch_total_tokens", "argument")
            raise SettingsError(
                f"max_batch_total_tokens is {settings.max_batch_total_tokens} ({source}): that cache needs "
                f"{num_blocks * self.block_bytes} bytes, {self.free} are free on {self.device}{_share(settings)} and a "
                f"step takes up to {self.activations + self.graphs} of them; give at most {max(most, 0)}"
            )
        return num_blocks


def limit_memory(device: Device, settings: Settings) -> None:
    """Hold the process to CUDA_MEMORY_FRACTION, before it takes any memory of the device."""
    fraction = settings.cuda_memory_fraction
    if not device.limit(fraction) and fraction < 1:
        logger.warning("cuda_memory_fraction is %g and has no effect: %s has no such limit", fraction, device.name)


def _share(settings: Settings) -> str:
    """Behind the memory that is free, where the user has left a part of it to others."""
    fraction = settings.cuda_memory_fraction
    return "" if fraction == 1 else f" (cuda_memory_fraction is {fraction:g})"


def measured(
    room: Room, runner: Runner, settings: Settings, selection: Selection, max_position: int, device: Device
) -> Room:
    """The same with what a step takes; the runner's groups have a cache of two blocks. Raises SettingsError."""
    most = room.blocks(settings)
    limits = limits_of(settings, selection, room, most, max_position)
    tokens, rows = limits.max_batch_prefill_tokens, settings.max_batch_size or settings.max_concurrent_requests
    if limits.counts_decodes:  # half of the step for each kind
        rows = min(rows, tokens // 2)
        tokens -= rows
    worst = Worst(
        prompt_tokens=min(tokens, (most - 1) * room.block_size),
        context=limits.max_total_tokens,
        rows=min(rows, most - 1),
        whole_prompts=limits.whole_prompts,
    )
    try:
        taken = activations(runner, worst, room.block_size, device)
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"a step of {worst.prompt_tokens} prompt tokens and {worst.rows} requests that decode does not fit into "
            f"the memory of {device.name}{_share(settings)}: lower max_batch_prefill_tokens or max_batch_size"
        ) from error
    except Exception as error:  # what cannot be computed is told to the requests that want it
        logger.warning("no memory is kept free for a step: the one to measure failed: %s", error)
        taken = 0
    return replace(room, free=device.memory().free, activations=taken)


def graph_sizes(settings: Settings) -> list[int]:
    """Rows for which decode steps are captured, ascending; none where the user wants none."""
    if settings.cuda_graphs in (None, "auto"):
        return ladder(settings.max_batch_size or max(settings.max_concurrent_requests, _USUAL_ROWS))
    return sorted({int(size) for size in str(settings.cuda_graphs).split(",")} - {0})


def limits_of(settings: Settings, selection: Selection, room: Room, num_blocks: int, max_position: int) -> Limits:
    """The scheduler's limits with that many blocks. Raises SettingsError where they cannot be."""
    spare = selection.capabilities.spare_slots
    capacity = (num_blocks - 1) * room.block_size - spare
    if capacity < 2:
        less = (
            f"; a step takes up to {room.activations} of {room.free} free bytes: lower max_batch_prefill_tokens, "
            "max_total_tokens or max_batch_size, and it takes less"
        )
        raise SettingsError(
            f"the cache has room for {max(num_blocks, 0)} blocks of {room.block_size} tokens, {room.block_bytes} bytes "
            f"each, and one is reserved: raise max_batch_total_tokens, or free memory{_share(settings)}"
            f"{less if room.activations else ''}"
        )
    model_limit = max_position or capacity
    total = settings.max_total_tokens or min(model_limit, capacity)
    if total > model_limit:
        raise SettingsError(f"max_total_tokens is {total}, the model takes at most {model_limit} positions: lower it")
    if reason := refusal(num_blocks, room.block_size, room.block_bytes, total + spare):
        raise SettingsError(reason)
    chunk = settings.max_batch_prefill_tokens or _usual_chunk(settings, room.device)
    if not selection.capabilities.prefix_caching:
        chunk = max(chunk, total)
    most = settings.max_batch_size
    if settings.deterministic:
        chunk = -(-chunk // ALIGNED) * ALIGNED
        most = min(most or chunk, chunk)
    return Limits(
        max_input_tokens=min(settings.max_input_tokens or total - 1, total - 1),
        max_total_tokens=total,
        max_batch_prefill_tokens=chunk,
        max_batch_size=most,
        counts_decodes=settings.deterministic,
        waiting_served_ratio=settings.waiting_served_ratio or None,
        max_waiting_tokens=settings.max_waiting_tokens if settings.waiting_served_ratio else None,
        whole_prompts=not selection.capabilities.prefix_caching,
        spare_slots=spare,
    )


def _usual_chunk(settings: Settings, device: str) -> int:
    """Prompt tokens of a step where nobody says how many."""
    if settings.deterministic:
        return max(_FIXED, settings.max_batch_size or 0)
    return _CHUNK if device == "cpu" else _CHUNK_OF_GPUS
