"""Does memory stay as it is? That of the server from its start to its end, that of its engine in its longest life."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import linear_regression, median
from typing import Any

from tests.soak.served import Held

ENOUGH = 480.0
"""Seconds of samples below which nothing is said: caches fill first."""
MOST_GROWTH = 16.0
"""Megabytes, from the second quarter's median to the last one's."""

Sample = tuple[float, float]
"""Seconds since the start, megabytes."""


@dataclass
class Memory:
    """Of the two processes, resident."""

    server: list[Sample] = field(default_factory=list)
    engines: dict[int, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By process."""
    held: list[Held] = field(default_factory=list)

    def add(self, seconds: float, server: Held, engine: int, of_engine: Held) -> None:
        """As it is now."""
        self.held.append(server)
        self.server.append((seconds, server.megabytes))
        self.engines[engine].append((seconds, of_engine.megabytes))

    def last(self) -> str:
        """To be told."""
        engine = next(reversed(self.engines.values()), [(0.0, 0.0)])
        now = self.held[-1] if self.held else None
        return f"server {now}, engine {engine[-1][1]:.0f} MB"

    def longest_life(self) -> list[Sample]:
        """Of an engine."""
        return max(self.engines.values(), key=lambda life: life[-1][0] - life[0][0], default=[])

    def judge(self, faults: list[str]) -> None:
        """Says which of the two has grown."""
        for name, samples in ("server", self.server), ("engine", self.longest_life()):
            found = trend(samples)
            if found.get("seconds", 0) >= ENOUGH and found["growth_mb"] > MOST_GROWTH:
                faults.append(f"the {name}'s memory has grown: {found}")

    def result(self) -> dict[str, Any]:
        """The trends, and a sample a minute."""
        minutes = {int(seconds // 60): (seconds, size) for seconds, size in self.server}
        return {
            "server": trend(self.server),
            "engine_longest_life": trend(self.longest_life()),
            "server_mb_by_minute": [round(size, 1) for _, size in minutes.values()],
            "engine_mb_by_minute": [
                round(size, 1)
                for size in {int(at // 60): size for life in self.engines.values() for at, size in life}.values()
            ],
        }


def trend(samples: list[Sample]) -> dict[str, float]:
    """From the second quarter to the last, and the slope over the second half."""
    if len(samples) < 8:
        return {}
    quarter = len(samples) // 4
    second, last = (median(size for _, size in part) for part in (samples[quarter : 2 * quarter], samples[-quarter:]))
    times, sizes = zip(*samples[len(samples) // 2 :], strict=True)
    return {
        "seconds": round(samples[-1][0] - samples[0][0], 1),
        "second_quarter_mb": round(second, 1),
        "last_quarter_mb": round(last, 1),
        "growth_mb": round(last - second, 1),
        "slope_mb_per_hour": round(3600 * linear_regression(times, sizes).slope, 2),
    }
