"""How long work takes on a device, each time with nothing of its data in a cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from octavo.attention.device import Device

FLUSHED_BYTES = 256 << 20
"""More than any device's second-level cache: written before each run."""
_READ_BYTES = 2 << 30
_WARM_UPS = 3


def seconds(device: Device, run: Callable[[], object], repeats: int, *, captured: bool = True) -> float:
    """The median. `captured`: by replays of a graph, where the device can: launches cost what they do in an engine."""

    def once() -> None:
        run()

    for _ in range(_WARM_UPS):
        once()
    device.synchronize()
    replay = (device.capture(once) if captured else None) or once
    cache = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device.torch_device)
    if device.torch_device.type == "cpu":
        return statistics.median(_on_host(replay, cache) for _ in range(repeats))
    events = [_events(device, replay, cache) for _ in range(repeats)]
    device.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1000


def _on_host(run: Callable[[], None], cache: torch.Tensor) -> float:
    cache.zero_()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _events(device: Device, run: Callable[[], None], cache: torch.Tensor) -> tuple[torch.Event, torch.Event]:
    start, end = (torch.Event(device.torch_device, enable_timing=True) for _ in range(2))
    cache.zero_()
    start.record()
    run()
    end.record()
    return start, end


def read_bytes_per_second(device: Device) -> float:
    """What the device's memory gives to a reduction that only reads: a ceiling for decoding."""
    size = min(_READ_BYTES, device.memory().free // 4)
    data = torch.ones(size // 4, dtype=torch.int32, device=device.torch_device)
    return size / seconds(device, data.amax, repeats=10)
