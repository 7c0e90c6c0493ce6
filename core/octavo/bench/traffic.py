"""What clients send to a server, and what came back to each: the two ends of the clients' process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from octavo.bench.exchange import Exchange
from octavo.bench.job import command, outcome


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy requests to /v1/completions, past any end of sequence, each answered as a stream."""

    url: str
    model: str
    """What the requests call it."""
    exchanges: list[Exchange]
    streams: int | None = None
    """Closed loop: so many clients, each of which sends its next request when its last one is answered."""
    arrivals: list[float] | None = None
    """Open loop: when each request is sent, seconds from the start, whatever has become of the others."""
    api_key: str | None = None
    cache_salt: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Times are seconds from the start."""

    sent: float
    """When it was due: a client that falls behind is no excuse."""
    texts: list[float]
    """When each event with new text was there."""
    ended: float
    tokens: int
    """As the server counts them."""
    error: str | None = None


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of all of it, in the order of the requests."""

    answers: list[Answer]
    cpu_seconds: float
    """Processor time that the clients took."""

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max(answer.ended for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def output_tokens(self) -> int:
        """Of the requests that were answered."""
        return sum(answer.tokens for answer in self.answers if answer.error is None)


def send(traffic: Traffic) -> Traced:
    """Send it all from a process of its own. Raises EngineFailed if that fails; a request that does is an answer."""
    return outcome("the clients", command("octavo.bench.clients"), traffic, Traced)


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """When each of `count` requests arrives, seconds: `rate` of them a second on average, none knows of the others."""
    gaps: Sequence[float] = np.random.default_rng([seed, 2]).exponential(1 / rate, count).cumsum().tolist()
    return list(gaps)
