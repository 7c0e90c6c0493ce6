"""Where the time of a run goes: PyTorch's profiler over octavo's own seams, operators grouped by what they are for.

An operator inside attention, the cache write or sampling belongs to that; the others are the model's: matrix products,
or the rest (norms, rotary positions, activations, residuals), which a compiled model has fused into kernels that are no
operators. What no operator accounts for is those kernels and Python, inside the model's forward or around it. Times are
the main thread's, and add up to the run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from octavo.bench.job import ProfileRow
from octavo.engine.runner import Runner

Result = TypeVar("Result")

PYTHON = "no operator of PyTorch"
"""Python, or native code that PyTorch's dispatcher does not see."""
MATRIX_PRODUCTS = "matrix products"
OTHER_OPERATORS = "the model's other operators"
ATTENTION, CACHE_WRITE, SAMPLING = "attention", "cache write", "sampling"
MODEL, ENGINE = "Python and compiled code in the model", "Python in the engine"
PLACES = (MATRIX_PRODUCTS, ATTENTION, CACHE_WRITE, SAMPLING, OTHER_OPERATORS, MODEL, ENGINE)

_OURS = "octavo: "
_PRODUCTS = re.compile(r"::\w*(mm|linear|matmul|gemm|conv1d|_linear_\w+)$")


class Event(Protocol):
    """What is used of a profiler's event."""

    @property
    def name(self) -> str:
        """The operator's, or the range's."""

    @property
    def cpu_parent(self) -> Event | None:
        """The event that it ran in."""

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds, those of the events within it left out."""


def profiled(runner: Runner, run: Callable[[], Result]) -> tuple[Result, list[ProfileRow]]:
    """Call `run`, which steps `runner`, under the profiler. The runner stays marked; it is not for use afterwards.

    Raises ValueError on a device whose work does not happen in the operators' own time.
    """
    if runner.device.type != "cpu":
        raise ValueError(f"a profile shows a processor's operators, and this model runs on {runner.device.type}")
    _mark_all(runner)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as record, record_function(_OURS + ENGINE):
        result = run()
    return result, grouped(record.events() or [])


def _mark_all(runner: Runner) -> None:
    _mark(runner.sampler, "choose", SAMPLING)
    _mark(runner, "forward", MODEL)
    for group in runner.groups:
        _mark(group.backend, "attend", ATTENTION)
        _mark(group.backend.layout, "write", CACHE_WRITE)


def _mark(owner: object, name: str, place: str) -> None:
    """Put a range of the profiler around a method, on a frozen object too."""
    inner: Callable[..., Any] = getattr(owner, name)

    def marked(*arguments: Any, **named: Any) -> Any:
        with record_function(_OURS + place):
            return inner(*arguments, **named)

    object.__setattr__(owner, name, marked)


def grouped(events: Iterable[Event]) -> list[ProfileRow]:
    """Each place's time, the longest first, each followed by its operators; none of it counts twice."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for event in events:
        place = _range_of(event)
        if place is None:
            continue
        operator = PYTHON if event.name.startswith(_OURS) else event.name
        if place in (MODEL, ENGINE) and operator != PYTHON:
            place = MATRIX_PRODUCTS if _PRODUCTS.search(operator) else OTHER_OPERATORS
        seconds[place, operator] += event.self_cpu_time_total / 1e6
        calls[place, operator] += 1
    rows = []
    for place in PLACES:
        members = sorted((key for key in seconds if key[0] == place), key=lambda key: -seconds[key])
        rows.append(ProfileRow(place, "", sum(seconds[key] for key in members), sum(calls[key] for key in members)))
        rows += [ProfileRow(place, key[1], seconds[key], calls[key]) for key in members]
    return rows


def _range_of(event: Event) -> str | None:
    """The innermost of octavo's ranges around an event, or that it is; None outside of all."""
    around: Event | None = event
    while around is not None:
        if around.name.startswith(_OURS):
            return around.name.removeprefix(_OURS)
        around = around.cpu_parent
    return None
