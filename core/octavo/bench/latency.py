"""How long clients waited: the times of each request, their percentiles, and how many were good enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from octavo.bench.machine import Fact
from octavo.bench.traffic import Answer

PERCENTILES = (50, 90, 99)
MEASURES = ("ttft", "tpot", "itl", "e2e")
"""To the first token, for each token after it, between two texts, and to the end."""


@dataclass(frozen=True, slots=True)
class Latency:
    """One request's, seconds."""

    ttft: float
    """From when it was due to the first text."""
    tpot: float | None
    """From the first text to the last, for each token after the first; None of one token."""
    e2e: float
    """From when it was due to the end of the answer."""
    itl: tuple[float, ...]
    """From each text to the next: a token's, or several tokens' where they make one character."""

    @classmethod
    def of(cls, answer: Answer) -> Latency:
        """Of an answer with text."""
        first, last = answer.texts[0], answer.texts[-1]
        return cls(
            ttft=first - answer.sent,
            tpot=(last - first) / (answer.tokens - 1) if answer.tokens > 1 else None,
            e2e=answer.ended - answer.sent,
            itl=tuple(later - earlier for earlier, later in pairwise(answer.texts)),
        )


def latencies(answers: Iterable[Answer]) -> list[Latency]:
    """Of those that were answered in full."""
    return [Latency.of(answer) for answer in answers if answer.error is None and answer.texts]


def values(found: Sequence[Latency], measure: str) -> list[float]:
    """All that there are of one measure, of all requests."""
    if measure == "itl":
        return [gap for latency in found for gap in latency.itl]
    every = [getattr(latency, measure) for latency in found]
    return [value for value in every if value is not None]


def percentiles(found: Sequence[Latency]) -> dict[str, Fact]:
    """Of each measure, by names such as ttft_p50_seconds; between two values they are interpolated."""
    row: dict[str, Fact] = {}
    for measure in MEASURES:
        if every := values(found, measure):
            ends = np.percentile(every, PERCENTILES).tolist()
            row |= {f"{measure}_p{rank}_seconds": round(end, 5) for rank, end in zip(PERCENTILES, ends, strict=True)}
    return row


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most that a good request may take, seconds; None: no matter."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def read(cls, text: str) -> Objectives:
        """From a text such as "ttft=1.5,tpot=0.2". Raises ValueError for any other."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = 0.0
            if name not in cls.__dataclass_fields__ or not 0 < limits[name] < float("inf"):
                raise ValueError(
                    f"slo has {part.strip()!r}: give ttft, tpot or e2e with seconds above 0, as in ttft=1.5,tpot=0.2"
                )
        return cls(**limits)

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return ", ".join(f"{name} {limit:g} s" for name, limit in limits.items() if limit is not None)

    def met_by(self, latency: Latency) -> bool:
        """Is a request good? One token alone has no tpot to be missed."""
        return all(
            limit is None or (taken := getattr(latency, name)) is None or taken <= limit
            for name, limit in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        )
