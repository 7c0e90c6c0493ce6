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
    """Tokens so far, those that are yet to arrive among them."""
    pending: int = 0
    """Of its last tokens, how many are being computed: the device has them sooner than the host."""
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
        """Tokens that have arrived: a view."""
        return self.tokens[: self.length - self.pending]

    @property
    def generated(self) -> NDArray[np.int32]:
        """Generated tokens that have arrived: a view."""
        return self.tokens[self.prompt_length : self.length - self.pending]

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are written."""
        return self.table.computed if self.table is not None else 0

    @property
    def is_complete(self) -> bool:
        """Has it all the tokens that it may have, the last of which is yet to arrive?"""
        return self.length >= self.max_length

    @property
    def queue_seconds(self) -> float:
        """How long it waited to be let in; 0 as long as it waits."""
        return 0.0 if self.started is None else self.started - self.submitted

    @property
    def uses_cache(self) -> bool:
        """May its prompt be taken from the cache? Not when each prompt token's logits are asked for."""
        return self.params.prompt_logprobs is None

    def expect(self, row: int) -> None:
        """Its next token is what sampling row `row` of the step that was just launched will give.

        Until it arrives, -1 - row stands in its place: whatever is launched next reads it there.
        """
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(64, self.length // 2), dtype=np.int32)])
        self.tokens[self.length] = -1 - row
        self.length += 1
        self.pending += 1

    def arrive(self, token: int) -> FinishReason | None:
        """The oldest token that it waits for. Says if the sequence ends with it: then it waits for none."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.tokens[self.length - self.pending] = token
        self.pending -= 1
        length = self.length - self.pending
        reason = FinishReason.LENGTH if length >= self.max_length else None
        if token in self.end_ids and length - self.prompt_length > self.params.min_tokens:
            reason = FinishReason.EOS
        if reason is not None:
            self.drop_pending()
        return reason

    def drop_pending(self) -> None:
        """What is being computed for it is of no use."""
        self.length -= self.pending
        self.pending = 0
