"""How long work takes on a device, each time with nothing of its data in a cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from octavo.attention.device import Device

FLUSHED_BYTES = 256 << 20
"""More than any device's second-level cache: written before each run."""
_READ_BYTES = 2 << 30
_WARM_UPS = 3


def prepared(device: Device, run: Callable[[], object], *, captured: bool = True) -> Callable[[], None]:
    """It, warmed up. `captured`: a graph's replay, where the device can: launches cost what they do in an engine."""

    def once() -> None:
        run()

    for _ in range(_WARM_UPS):
        once()
    device.synchronize()
    recorded = device.capture(once) if captured else None
    return once if recorded is None else partial(_replay, recorded, run)


def _replay(recorded: Callable[[], None], run: Callable[[], object]) -> None:
    """`run` is kept with it, and so what the graph reads: to a graph that is memory which may be given away."""
    recorded()


def in_turns(device: Device, runs: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """The median seconds of each, run one after the other, over and over: what drifts meanwhile favours none."""
    cache = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device.torch_device)
    taken = _on_host if device.torch_device.type == "cpu" else partial(_on_device, device)
    return _medians([[taken(run, cache) for run in runs] for _ in range(repeats)])


def seconds(device: Device, run: Callable[[], object], repeats: int, *, captured: bool = True) -> float:
    """The median of one alone."""
    return in_turns(device, [prepared(device, run, captured=captured)], repeats)[0]


def _medians(turns: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(taken) for taken in zip(*turns, strict=True)]


def _on_host(run: Callable[[], None], cache: torch.Tensor) -> float:
    cache.zero_()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _on_device(device: Device, run: Callable[[], None], cache: torch.Tensor) -> float:
    """Launched while the cache is being written, with nothing else queued: so that no launch is waited for."""
    start, end = (torch.Event(device.torch_device, enable_timing=True) for _ in range(2))
    cache.zero_()
    start.record()
    run()
    end.record()
    device.synchronize()
    return start.elapsed_time(end) / 1000


def read_bytes_per_second(device: Device) -> float:
    """What the device's memory gives to a reduction that only reads: a ceiling for decoding."""
    size = min(_READ_BYTES, device.memory().free // 4)
    data = torch.ones(size // 4, dtype=torch.int32, device=device.torch_device)
    return size / seconds(device, data.amax, repeats=10)
