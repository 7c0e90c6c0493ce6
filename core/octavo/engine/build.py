"""From a model and settings to an engine: inspect the layers, choose a backend, size the cache."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo import native
from octavo.attention.device import Device
from octavo.attention.select import Selection, choose, choose_device
from octavo.engine.engine import Engine
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Limits, Scheduler
from octavo.kv.budget import blocks_for_bytes, blocks_for_tokens, refusal
from octavo.kv.manager import KVCacheManager
from octavo.models import bridge
from octavo.models.capture import Forward, NotCapturable, eager
from octavo.models.compile import CompileFailed, compiled
from octavo.models.demo import model_location
from octavo.models.load import LoadedModel, load
from octavo.models.pack import pack
from octavo.plugins import Plugins
from octavo.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Of the free host memory that the cache may take when the user names no size: the machine has others to serve."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what was decided on the way."""

    engine: Engine
    selection: Selection
    block_bytes: int
    """Of one block in all groups together."""


def open_engine(settings: Settings, plugins: Plugins, *, progress: bool = False) -> tuple[LoadedModel, Built]:
    """Load the model that the settings name and build its engine.

    Raises SettingsError, ModelNotFound, UnsupportedModel, BackendUnavailable or UnknownBackend, each with its reasons.
    """
    device = choose_device(settings.device, plugins)
    # A backend that nobody has, or that cannot run here, is no reason to read gigabytes first.
    choose([], device, attention=settings.attention, block_size=settings.block_size, plugins=plugins)
    loaded = load(
        model_location(settings),
        dtype=_dtype(settings.dtype, device.name),
        device=device.torch_device,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        progress=progress,
    )
    return loaded, build_engine(loaded, device, settings, plugins)


def _dtype(name: str, device: str) -> torch.dtype | str:
    """The checkpoint's own unless the user names one; float32 on a CPU, which is slower with less."""
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def build_engine(loaded: LoadedModel, device: Device, settings: Settings, plugins: Plugins) -> Built:
    """Bind the model's attention to a backend. Raises UnsupportedModel, BackendUnavailable or SettingsError."""
    pack(loaded.model)
    calls = bridge.inspect(loaded.model)
    kv_dtype = loaded.dtype if settings.kv_cache_dtype == "auto" else getattr(torch, settings.kv_cache_dtype)
    alike = bridge.groups(calls, loaded.dtype, kv_dtype)
    specs = [spec for spec, _ in alike]
    selection = choose(
        specs, device, attention=settings.attention, block_size=settings.block_size,
        prefix_caching=settings.prefix_caching, plugins=plugins,
    )  # fmt: skip
    logger.info(selection.summary())
    options = settings.attention_options
    backends = [selection.build(spec, device, options, bridge.sinks(calls, members)) for spec, members in alike]
    block_bytes = sum(backend.layout.block_bytes for backend in backends)
    num_blocks = _num_blocks(settings, selection.block_size, block_bytes, device)
    limits = _limits(loaded, settings, selection, num_blocks, block_bytes)
    groups = []
    for backend, (_, members) in zip(backends, alike, strict=True):
        group = bridge.AttentionGroup(backend, backend.layout.allocate(num_blocks, device.torch_device))
        bridge.bind(calls, members, group)
        groups.append(group)
    prefix_caching = selection.capabilities.prefix_caching and settings.prefix_caching is not False
    scheduler = Scheduler(KVCacheManager(num_blocks, selection.block_size, prefix_caching), limits)
    runner = Runner(_forward(loaded.model, settings, device), groups, device.torch_device)
    engine = Engine(scheduler, runner, loaded.eos_token_ids, _vocab_size(loaded.model), plugins)
    return Built(engine, selection, block_bytes)


def _forward(model: PreTrainedModel, settings: Settings, device: Device) -> Forward:
    """Compiled where it is wanted or, if nothing was said, where it can be."""
    wanted = settings.compile
    if wanted is False or (wanted is None and (device.name != "cpu" or native.compiler() is None)):
        return eager(model)
    started = time.perf_counter()
    try:
        forward = compiled(model)
    except (NotCapturable, CompileFailed) as error:
        if wanted:
            raise SettingsError(f"compile: {error}. Unset COMPILE to run the model as it is") from error
        logger.warning("the model runs uncompiled: %s", error)
        return eager(model)
    logger.info("compiled the model in %.1f s", time.perf_counter() - started)
    return forward


def _num_blocks(settings: Settings, block_size: int, block_bytes: int, device: Device) -> int:
    """Blocks of the cache, block 0 included: as many as the user asks for, or as the free memory holds."""
    free = device.memory().free
    if settings.max_batch_total_tokens is None:
        share = CPU_SHARE if device.name == "cpu" else 1
        return blocks_for_bytes(int(free * share * settings.tgi_wiggle_room), block_bytes)
    num_blocks = blocks_for_tokens(settings.max_batch_total_tokens, block_size) + 1
    if num_blocks * block_bytes > free:
        most = (blocks_for_bytes(free, block_bytes) - 1) * block_size
        raise SettingsError(
            f"max_batch_total_tokens is {settings.max_batch_total_tokens}: that cache needs {num_blocks * block_bytes} "
            f"bytes, {free} are free on {device.name}; give at most {max(most, 0)}"
        )
    return num_blocks


def _limits(loaded: LoadedModel, settings: Settings, selection: Selection, num_blocks: int, block_bytes: int) -> Limits:
    spare = selection.capabilities.spare_slots
    capacity = (num_blocks - 1) * selection.block_size - spare
    if capacity < 2:
        raise SettingsError(
            f"the cache has room for {max(num_blocks, 0)} blocks of {selection.block_size} tokens, {block_bytes} bytes "
            "each, and one is reserved: raise max_batch_total_tokens, or free memory"
        )
    model_limit = loaded.max_position or capacity
    total = settings.max_total_tokens or min(model_limit, capacity)
    if total > model_limit:
        raise SettingsError(f"max_total_tokens is {total}, the model takes at most {model_limit} positions: lower it")
    if reason := refusal(num_blocks, selection.block_size, block_bytes, total + spare):
        raise SettingsError(reason)
    chunk = settings.max_batch_prefill_tokens
    if not selection.capabilities.prefix_caching:
        chunk = max(chunk, total)
    return Limits(
        max_input_tokens=min(settings.max_input_tokens or total - 1, total - 1),
        max_total_tokens=total,
        max_batch_prefill_tokens=chunk,
        max_batch_size=settings.max_batch_size,
        waiting_served_ratio=settings.waiting_served_ratio or None,
        max_waiting_tokens=settings.max_waiting_tokens if settings.waiting_served_ratio else None,
        whole_prompts=not selection.capabilities.prefix_caching,
        spare_slots=spare,
    )


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    return embeddings.num_embeddings
