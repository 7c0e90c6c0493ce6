"""Can one tenant time what another has sent? Asks a running server, as its tenants do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from octavo.bench.job import EngineFailed
from octavo.bench.machine import Fact
from octavo.bench.report import Report

Seconds = NDArray[np.float64]

FRESH = "never sent"
KINDS = (FRESH, "sent by the other key", "sent with the same key", "sent with the same key, another salt")
"""What happened to a prompt before it is timed."""
FLIPS = 10_000
WARM_UP = 3
"""Rounds that are left out."""


class Reply(NamedTuple):
    """To a prompt of which one token was asked for."""

    seconds: float
    """Until it was whole, and so until its first token."""
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Options:
    """What to ask."""

    url: str
    keys: tuple[str, str]
    rounds: int
    words: int
    seed: int


class Client:
    """One tenant's, on a connection of its own that is kept."""

    def __init__(self, url: str, key: str) -> None:
        """Raises ValueError for what is no address."""
        address = urlsplit(url)
        kinds = {"http": HTTPConnection, "https": HTTPSConnection}
        if address.scheme not in kinds or address.hostname is None:
            raise ValueError(f"url is {url!r}: give the server's address, e.g. http://localhost:3000")
        self._url, self._path = url, address.path.rstrip("/")
        self._connection = kinds[address.scheme](address.hostname, address.port, timeout=600)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def get(self, path: str) -> Any:
        """A route's JSON."""
        return self._answer("GET", path, None)[1]

    def prompt(self, text: str, salt: str | None = None) -> Reply:
        """Have a prompt continued by one token."""
        body = json.dumps({"prompt": text, "max_tokens": 1, "temperature": 0, "cache_salt": salt}).encode()
        seconds, answer = self._answer("POST", "/v1/completions", body)
        usage = answer["usage"]
        return Reply(seconds, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])

    def _answer(self, method: str, path: str, body: bytes | None) -> tuple[float, Any]:
        """Raises EngineFailed."""
        started = time.perf_counter()
        try:
            self._connection.request(method, self._path + path, body, self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, HTTPException) as error:
            raise EngineFailed(f"{self._url} does not answer: {error}") from error
        seconds = time.perf_counter() - started
        if response.status != 200:
            raise EngineFailed(f"{self._url}{path} answers {response.status}: {content[:200].decode(errors='replace')}")
        return seconds, json.loads(content)


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Time the first token of prompts of each kind. Raises EngineFailed.

    In each round a prompt of each kind is prepared, in random order, a stranger's in place of the one that is never
    sent; then each is timed, in another random order. All are timed with the second key. What the machine does
    meanwhile meets all kinds alike.
    """
    random = np.random.default_rng(options.seed)
    replies: dict[str, list[Reply]] = {kind: [] for kind in KINDS}
    other, same = (Client(options.url, key) for key in options.keys)
    with closing(other), closing(same):
        info = same.get("/info")
        for number in range(WARM_UP + options.rounds):
            tell(f"round {number + 1} of {WARM_UP + options.rounds}")
            for kind, reply in _round(other, same, options.words, random):
                if number >= WARM_UP:
                    replies[kind].append(reply)
    return Report(
        bench="tenants",
        workload={
            "model": info["model_id"],
            "backend": info["attention"],
            "rounds": options.rounds,
            "prompt_tokens": int(np.median([one.prompt_tokens for one in replies[FRESH]])),
            "seed": options.seed,
        },
        rows=[_row(kind, replies[kind], replies[FRESH], random) for kind in KINDS],
    )


def _round(other: Client, same: Client, words: int, random: np.random.Generator) -> list[tuple[str, Reply]]:
    prompts = {kind: _text(words, random) for kind in KINDS}
    senders: dict[str, tuple[Client, str, str | None]] = {
        kind: (same, prompts[kind], "another" if kind == KINDS[3] else None) for kind in KINDS[2:]
    }
    senders |= {FRESH: (other, _text(words, random), None), KINDS[1]: (other, prompts[KINDS[1]], None)}
    for kind in random.permutation(KINDS):
        client, text, salt = senders[kind]
        client.prompt(text, salt)
    return [(kind, same.prompt(prompts[kind])) for kind in random.permutation(KINDS).tolist()]


def _text(words: int, random: np.random.Generator) -> str:
    """Words that no one has sent before, from their first letter on."""
    letters = random.integers(ord("a"), ord("z") + 1, size=(words, 6), dtype=np.uint8)
    return " ".join(bytes(word).decode() for word in letters)


def _row(kind: str, replies: Sequence[Reply], fresh: Sequence[Reply], random: np.random.Generator) -> dict[str, Fact]:
    seconds = np.array([one.seconds for one in replies])
    row: dict[str, Fact] = {
        "prompt": kind,
        "requests": len(replies),
        "cached_tokens": int(np.median([one.cached_tokens for one in replies])),
        "cached_tokens_max": max(one.cached_tokens for one in replies),
        "first_token_seconds": round(float(np.median(seconds)), 6),
        "first_token_p90_seconds": round(float(np.quantile(seconds, 0.9)), 6),
    }
    if replies is not fresh:
        later = seconds - np.array([one.seconds for one in fresh])
        low, high = interval(later, random)
        row |= {
            "difference_seconds": round(float(np.median(later)), 6),
            "difference_low_seconds": round(low, 6),
            "difference_high_seconds": round(high, 6),
            "p_value": p_value(later, random),
        }
    return row


def p_value(differences: Seconds, random: np.random.Generator) -> float:
    """How likely paired differences [pairs] this one-sided are if either sign of each were as likely.

    Wilcoxon's signed-rank test, with the statistic's distribution drawn.
    """
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1.0
    signs = random.choice([-1.0, 1.0], size=(FLIPS, len(ranks)))
    as_far = np.abs(signs @ ranks) >= abs(np.sign(differences) @ ranks)
    return float((1 + as_far.sum()) / (1 + FLIPS))


def interval(differences: Seconds, random: np.random.Generator) -> tuple[float, float]:
    """Where the median of the differences [pairs] lies, 95 % (percentile bootstrap)."""
    drawn = random.choice(differences, size=(FLIPS, len(differences)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)
