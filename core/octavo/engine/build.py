"""From a model and settings to an engine: inspect the layers, choose a backend, size the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo import native
from octavo.attention.contract import AttentionBackend
from octavo.attention.device import Device
from octavo.attention.select import Selection, choose, choose_device
from octavo.engine import warm_up
from octavo.engine.drawing import compiled_draw, plain_draw
from octavo.engine.engine import Engine
from octavo.engine.fixed import FixedSteps
from octavo.engine.graphs import DecodeGraphs, NotCaptured
from octavo.engine.invariance import is_invariant
from octavo.engine.limits import Limits
from octavo.engine.runner import Runner
from octavo.engine.sampler import Sampler
from octavo.engine.scheduler import Scheduler
from octavo.engine.sizing import Room, graph_sizes, limit_memory, limits_of, measured
from octavo.kv.budget import MemoryUse
from octavo.kv.manager import KVCacheManager
from octavo.models import bridge
from octavo.models.capture import Forward, NotCapturable, capture, eager
from octavo.models.compile import CompileFailed, compiled
from octavo.models.demo import model_location
from octavo.models.kv_scales import find_scales
from octavo.models.load import LoadedModel, load, load_random
from octavo.models.pack import pack, weight_bytes
from octavo.plugins import Plugins
from octavo.settings import Settings, SettingsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what was decided on the way."""

    engine: Engine
    selection: Selection
    memory: MemoryUse


def open_engine(
    settings: Settings,
    plugins: Plugins,
    *,
    progress: bool = False,
    on_loaded: Callable[[LoadedModel], None] = lambda _: None,
) -> tuple[LoadedModel, Built]:
    """Load the model that the settings name and build its engine; between the two `on_loaded` is called.

    Raises SettingsError, ModelNotFound, UnsupportedModel, BackendUnavailable or UnknownBackend, each with its reasons.
    """
    device = choose_device(settings.device, plugins)
    # A backend that nobody has, or that cannot run here, is no reason to read gigabytes first.
    choose([], device, attention=settings.attention, block_size=settings.block_size, plugins=plugins)
    limit_memory(device, settings)
    loaded = _loaded(settings, device, progress)
    on_loaded(loaded)
    return loaded, build_engine(loaded, device, settings, plugins)


def _loaded(settings: Settings, device: Device, progress: bool) -> LoadedModel:
    model, dtype, where = model_location(settings), _dtype(settings.dtype, device.name), device.torch_device
    trusted = settings.trust_remote_code
    if settings.load_format == "dummy":
        logger.warning("the weights are drawn at random, since load_format is dummy: for benchmarks alone")
        return load_random(model, dtype=dtype, device=where, trust_remote_code=trusted)
    return load(
        model, dtype=dtype, device=where, revision=settings.revision, trust_remote_code=trusted, progress=progress
    )


def _dtype(name: str, device: str) -> torch.dtype | str:
    """The checkpoint's own unless the user names one; float32 on a CPU, which is slower with less."""
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The model's own unless the user names one; PyTorch calls TGI's fp8 float8."""
    if name == "auto":
        return dtype
    found: torch.dtype = getattr(torch, name.replace("fp8_", "float8_"))
    return found


def build_engine(loaded: LoadedModel, device: Device, settings: Settings, plugins: Plugins) -> Built:
    """Bind the model's attention to a backend. Raises UnsupportedModel, BackendUnavailable or SettingsError."""
    pack(loaded.model)
    calls = bridge.inspect(loaded.model)
    kv_dtype = _cache_dtype(settings.kv_cache_dtype, loaded.dtype)
    alike = bridge.groups(calls, loaded.dtype, kv_dtype, settings.deterministic)
    specs = [spec for spec, _ in alike]
    selection = choose(
        specs, device, attention=settings.attention, block_size=settings.block_size,
        prefix_caching=settings.prefix_caching, plugins=plugins,
    )  # fmt: skip
    logger.info(selection.summary())
    scales = find_scales(loaded.files, loaded.model, calls, alike)
    options = settings.attention_options
    backends = [selection.build(spec, device, options, bridge.sinks(calls, members)) for spec, members in alike]
    block_bytes = sum(backend.layout.block_bytes for backend in backends)
    workspaces = _workspace_bytes(backends)
    groups = []
    for backend, (_, members) in zip(backends, alike, strict=True):
        group = bridge.AttentionGroup(backend, backend.layout.allocate(warm_up.BLOCKS, device.torch_device))
        bridge.bind(calls, members, group, scales)
        groups.append(group)
    runner = Runner(_forward(loaded.model, settings, device), groups, device.torch_device)
    vocab_size = _vocab_size(loaded.model)
    if device.asynchronous and _is_compiled(settings, device):
        runner.sampler = Sampler(compiled_draw(vocab_size, loaded.dtype, device.torch_device))
    room = Room(device.name, device.memory().free, selection.block_size, block_bytes)
    if settings.deterministic:
        limits = limits_of(settings, selection, room, room.blocks(settings), loaded.max_position)
        runner.fixed = _fixed(runner, selection, limits, device)
        runner.sampler.invariant = True
    room = measured(room, runner, settings, selection, loaded.max_position, device)
    sizes = graph_sizes(settings) if device.captures and selection.capabilities.graphs != "none" else []
    if sizes:  # once with a cache of no size, to know what they take of the memory that is left for one
        limits = limits_of(settings, selection, room, room.blocks(settings), loaded.max_position)
        graphs = _graph_bytes(runner, sizes, selection, limits, device)
        room, sizes = replace(room, graphs=graphs or 0), [] if graphs is None else sizes
    num_blocks = room.blocks(settings)
    limits = limits_of(settings, selection, room, num_blocks, loaded.max_position)
    for group in groups:
        group.cache = group.backend.layout.allocate(num_blocks, device.torch_device)
    started = time.perf_counter()
    if sizes and runner.fixed is not None:
        _is_captured(runner.fixed)
    elif sizes:
        runner.graphs = _captured(runner, sizes, selection, limits, device)
    if runner.graphs is not None:
        logger.info("captured decode steps of %d sizes in %.1f s", len(sizes), time.perf_counter() - started)
    if runner.fixed is not None and not is_invariant(runner.fixed, num_blocks, selection.block_size, vocab_size):
        raise SettingsError(
            f"deterministic: on {device.name} this model gives a token other bits at another place of a step: some "
            "library that computes it does not keep rows apart. Unset DETERMINISTIC"
        )
    memory = MemoryUse(
        weights=weight_bytes(loaded.model), workspaces=workspaces, activations=room.activations, graphs=room.graphs,
        num_blocks=num_blocks, block_size=selection.block_size, block_bytes=block_bytes,
    )  # fmt: skip
    _tell(memory)
    prefix_caching = selection.capabilities.prefix_caching and settings.prefix_caching is not False
    scheduler = Scheduler(KVCacheManager(num_blocks, selection.block_size, prefix_caching), limits)
    engine = Engine(scheduler, runner, loaded.eos_token_ids, vocab_size, plugins, ahead=device.asynchronous)
    return Built(engine, selection, memory)


def _forward(model: PreTrainedModel, settings: Settings, device: Device) -> Forward:
    """Compiled where it is wanted or, if nothing was said, where it can be.

    What is to be deterministic must be recordable in any case: then no shape in it depends on what is computed.
    """
    if not _is_compiled(settings, device):
        if settings.deterministic:
            _check_recordable(model)
        return eager(model)
    started = time.perf_counter()
    try:
        forward = compiled(model, fixed=settings.deterministic)
    except (NotCapturable, CompileFailed) as error:
        if settings.deterministic and isinstance(error, NotCapturable):
            raise _unrecordable(error) from error
        if settings.compile:
            raise SettingsError(f"compile: {error}. Unset COMPILE to run the model as it is") from error
        logger.warning("the model runs uncompiled: %s", error)
        return eager(model)
    logger.info("compiled the model in %.1f s", time.perf_counter() - started)
    return forward


def _check_recordable(model: PreTrainedModel) -> None:
    try:
        capture(model)
    except NotCapturable as error:
        raise _unrecordable(error) from error


def _unrecordable(error: NotCapturable) -> SettingsError:
    return SettingsError(
        f"deterministic: what this model computes for a token depends on the others of its step, as experts do that "
        f"share out tokens: {error}. Unset DETERMINISTIC"
    )


def _is_compiled(settings: Settings, device: Device) -> bool:
    """As the user says or, if nothing is said, wherever there is what PyTorch's compiler needs."""
    if settings.compile is not None:
        return settings.compile
    return (
        native.compiler() is not None if device.name == "cpu" else device.captures and find_spec("triton") is not None
    )


def _graph_bytes(runner: Runner, sizes: list[int], selection: Selection, limits: Limits, device: Device) -> int | None:
    """Bytes that graphs of these sizes keep, worked out from the largest two; None if they cannot be captured."""
    if runner.fixed is not None:
        fixed, done = runner.fixed, []
        kept = device.peak(lambda: done.append(_is_captured(fixed)))
        return kept if done[0] else None
    taken = []
    for count in (1, 2):
        found: list[DecodeGraphs | None] = []
        few = sizes[-count:]
        taken.append(device.peak(lambda: found.append(_captured(runner, few, selection, limits, device))))  # noqa: B023
        if found[0] is None:
            return None
    largest, two = taken
    return largest + max(two - largest, 0) * (len(sizes) - 1)


def _captured(
    runner: Runner, sizes: list[int], selection: Selection, limits: Limits, device: Device
) -> DecodeGraphs | None:
    """Graphs of decode steps of these sizes, or None, with the reason in the log."""
    draw, width = runner.sampler.draw or plain_draw, _width(limits, selection)
    graphs = DecodeGraphs(runner.forward, draw, runner.groups, device, sizes, width)
    return graphs if _is_captured(graphs) else None


def _is_captured(graphs: DecodeGraphs | FixedSteps) -> bool:
    """Capture them; the reason is in the log if that cannot be."""
    try:
        graphs.capture()
    except (NotCaptured, torch.OutOfMemoryError) as error:
        logger.warning("steps run as they are, without graphs: %s", error)
        return False
    return True


def _fixed(runner: Runner, selection: Selection, limits: Limits, device: Device) -> FixedSteps:
    """Steps of as many tokens as one may have."""
    draw, tokens = runner.sampler.draw or plain_draw, limits.max_batch_prefill_tokens
    logger.info("deterministic: every step computes %d tokens", tokens)
    return FixedSteps(runner.forward, draw, runner.groups, device, tokens, _width(limits, selection))


def _width(limits: Limits, selection: Selection) -> int:
    """Blocks of the longest request."""
    return -(-(limits.max_total_tokens + limits.spare_slots) // selection.block_size)


def _workspace_bytes(backends: Sequence[AttentionBackend]) -> int:
    """What they keep on the device: several may share it."""
    storages = [tensor.untyped_storage() for backend in backends for tensor in backend.workspaces()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tell(memory: MemoryUse) -> None:
    """A small table, and its numbers for those who read the log as JSON."""
    lines = "\n".join(f"  {what:<11} {size:>13}  {more}".rstrip() for what, size, more in memory.rows())
    logger.info("memory:\n%s", lines, extra={"fields": {"memory": memory.to_dict()}})


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    return embeddings.num_embeddings
