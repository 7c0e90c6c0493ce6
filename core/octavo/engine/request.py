"""A request inside the engine: tokens, its blocks, and what becomes of it."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.sampling_params import SamplingParams
from octavo.kv.node import Namespace
from octavo.kv.table import BlockTable


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    """The model ended it, with one of its own end tokens or one of the request's stop token ids."""
    LENGTH = "length"
    STOP = "stop"
    """A stop text."""
    CANCELLED = "cancelled"
    ERROR = "error"


class Label(NamedTuple):
    """What a request's user calls it: the engine hands it on to those who observe."""

    name: str = ""
    trace: str = ""
    """A W3C `traceparent`, or nothing."""


NO_LABEL = Label()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: a prompt and what is generated behind it."""

    id: int
    tokens: NDArray[np.int32]
    """Prompt and generated tokens, with room to grow: see `known`."""
    prompt_length: int
    max_length: int
    """Prompt and generated tokens together end here."""
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    """Tokens that end it; empty with ignore_eos and no stop token ids."""
    namespace: Namespace = field(default_factory=Namespace)
    label: Label = NO_LABEL
    length: int = 0
    """Tokens known so far."""
    table: BlockTable | None = None
    """Its blocks, while it runs."""
    cached_tokens: int | None = None
    """Prompt tokens that its first admission found in the cache."""
    prompt_reported: int = 0
    """Prompt positions whose log-probabilities were given out."""
    preemptions: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    """Seconds of a clock that only goes forward, as those below."""
    started: float | None = None
    """When it was first let in."""
    first_token: float | None = None

    @classmethod
    def new(
        cls, id: int, prompt: NDArray[np.int32], max_length: int, params: SamplingParams, seed: int,
        end_ids: frozenset[int], namespace: Namespace, label: Label = NO_LABEL,
    ) -> Request:  # fmt: skip
        """A request that has not run."""
        return cls(id, prompt.copy(), len(prompt), max_length, params, seed, end_ids, namespace, label, len(prompt))

    @property
    def known(self) -> NDArray[np.int32]:
        """Tokens known so far: a view."""
        return self.tokens[: self.length]

    @property
    def generated(self) -> NDArray[np.int32]:
        """Generated tokens: a view."""
        return self.tokens[self.prompt_length : self.length]

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are written."""
        return self.table.computed if self.table is not None else 0

    @property
    def queue_seconds(self) -> float:
        """How long it waited to be let in; 0 as long as it waits."""
        return 0.0 if self.started is None else self.started - self.submitted

    @property
    def uses_cache(self) -> bool:
        """May its prompt be taken from the cache? Not when each prompt token's logits are asked for."""
        return self.params.prompt_logprobs is None

    def append(self, token: int) -> None:
        """A generated token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(64, self.length // 2), dtype=np.int32)])
        self.tokens[self.length] = token
        self.length += 1

    def ending(self, token: int) -> FinishReason | None:
        """Does the sequence end with this token, just appended?"""
        if token in self.end_ids and self.length - self.prompt_length > self.params.min_tokens:
            return FinishReason.EOS
        return FinishReason.LENGTH if self.length >= self.max_length else None
