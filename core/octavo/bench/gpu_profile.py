"""Where a GPU's time goes in decode steps: its kernels, and the time between them in which it has nothing to do."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from octavo.bench.job import ProfileRow
from octavo.bench.profiler import ATTENTION, CACHE_WRITE, MATRIX_PRODUCTS
from octavo.engine.runner import Flight, Runner
from octavo.engine.step import Step

Result = TypeVar("Result")

IDLE = "the GPU has nothing to do"
OTHER_KERNELS = "other kernels"
STEPS = 16
"""That are looked at, of the first in which all rows decode: a profile of a whole run would be gigabytes."""
_SETTLED = 4
"""Such steps before them."""
_PLACES = (
    (re.compile(r"^(decode|prefill|split|cut)$|attention|flash", re.IGNORECASE), ATTENTION),
    (re.compile(r"^write$"), CACHE_WRITE),
    (re.compile(r"nvjet|gemm|gemv|cutlass|splitK|_mm_", re.IGNORECASE), MATRIX_PRODUCTS),
)


class Kernel(Protocol):
    """What is used of a profiler's event."""

    @property
    def name(self) -> str:
        """The kernel's."""

    @property
    def device_type(self) -> Any:
        """Where it ran."""

    @property
    def time_range(self) -> Any:
        """Its `start` and `end`, microseconds."""


@dataclass(slots=True)
class _Watch:
    """Launches steps, and has the profiler look at some of them."""

    launch: Callable[[Step], Flight]
    record: Any
    seen: int = 0

    def __call__(self, step: Step) -> Flight:
        rows = len(step.context_lengths)
        if step.decodes == rows:
            self.seen += 1
            if self.seen == _SETTLED + 1:
                self.record.start()
            elif self.seen == _SETTLED + STEPS + 1:
                torch.cuda.synchronize()
                self.record.stop()
        return self.launch(step)


def profiled(runner: Runner, run: Callable[[], Result]) -> tuple[Result, list[ProfileRow]]:
    """Call `run`, which steps `runner`. Raises ValueError if it has too few steps in which all rows decode."""
    record = profile(activities=[ProfilerActivity.CUDA])
    watch = _Watch(runner.launch, record)
    runner.launch = watch  # type: ignore[method-assign]
    result = run()
    needed = _SETTLED + STEPS + 1
    if watch.seen < needed:
        raise ValueError(
            f"a profile looks at {needed} steps in which all requests decode, and there were {watch.seen}: "
            "ask for longer answers"
        )
    return result, kernels(record.events() or [])


def kernels(events: Iterable[Kernel]) -> list[ProfileRow]:
    """Each place's time and its kernels', the longest first, and the time that nothing ran in. It adds up."""
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type.name == "CUDA"
    )
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    idle, gaps, busy_until = 0.0, 0, ran[0][0] if ran else 0.0
    for start, end, name in ran:
        key = _place(name), _plain(name)
        if start > busy_until:
            idle, gaps = idle + (start - busy_until) / 1e6, gaps + 1
        seconds[key] += max(end - max(start, busy_until), 0) / 1e6  # what ran beside another counts once
        calls[key] += 1
        busy_until = max(busy_until, end)
    rows = []
    for place in (ATTENTION, MATRIX_PRODUCTS, CACHE_WRITE, OTHER_KERNELS):
        members = sorted((key for key in seconds if key[0] == place), key=lambda key: -seconds[key])
        rows.append(ProfileRow(place, "", sum(seconds[key] for key in members), sum(calls[key] for key in members)))
        rows += [ProfileRow(place, key[1], seconds[key], calls[key]) for key in members]
    return [*rows, ProfileRow(IDLE, "", idle, gaps)]


def _plain(name: str) -> str:
    """A C++ kernel's name without its result and template arguments, which are a page long."""
    return name.rpartition("::type ")[2].removeprefix("void ").partition("<")[0]


def _place(name: str) -> str:
    return next((place for pattern, place in _PLACES if pattern.search(name)), OTHER_KERNELS)
