"""What the sampler needs to know of the sequences of one step, as plain arrays: no request, no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_DRAWS = 64  # uniforms computed at once for a sequence


class SamplingRow(NamedTuple):
    """One sequence that needs its next token.

    sequence_seed: up to 128 bits, so that a request's seed and a sequence's index fit side by side.
    position: how many tokens were generated before. banned: ids that must not come now.
    """

    params: SamplingParams
    sequence_seed: int
    position: int
    prompt_ids: npt.NDArray[np.integer]
    output_ids: Sequence[int] | npt.NDArray[np.integer]
    banned: tuple[int, ...] = ()


@dataclass(slots=True)
class TokenEntries:
    """Entries of a sparse [rows, vocab] matrix: rows and tokens int64, values float32, all [entries]."""

    rows: Integers
    tokens: Integers
    values: npt.NDArray[np.float32]

    def of(self, row: int) -> TokenEntries:
        """One row's, as those of the only row."""
        own = self.rows == row
        return TokenEntries(np.zeros(int(own.sum()), dtype=np.int64), self.tokens[own], self.values[own])


@dataclass(slots=True)
class SamplingBatch:
    """What one step's sampling depends on: one row per sequence, arrays [rows] unless said otherwise.

    argmax_only: every row is greedy on the raw logits and wants no log-probability. uniforms: float64 in [0, 1).
    top_logprobs: -1 none, 0 the chosen token's, k the k likeliest tokens' too.
    biases: added to the logits; a ban is -inf.
    penalised: int64 [penalised rows], the rows with penalties. history: their tokens, `rows` counting within
    `penalised`, value 1 for a generated token and 0 for one of the prompt.
    """

    argmax_only: bool
    temperature: Floats
    top_k: Integers
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    repetition_penalty: Floats
    frequency_penalty: Floats
    presence_penalty: Floats
    uniforms: Floats
    top_logprobs: Integers
    biases: TokenEntries
    penalised: Integers
    history: TokenEntries

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def temperature_only(self) -> bool:
        """Does no row want more than a temperature, but for log-probabilities?"""
        filtered = self.top_k.any() or self.min_p.any() or (self.top_p < 1).any() or (self.typical_p < 1).any()
        return not (filtered or self.biases.rows.size or self.penalised.size)

    @property
    def wanting_more(self) -> set[int]:
        """Rows that want more than a temperature, but for log-probabilities."""
        filtered = (self.top_k > 0) | (self.min_p > 0) | (self.top_p < 1) | (self.typical_p < 1)
        return {*np.flatnonzero(filtered).tolist(), *self.biases.rows.tolist(), *self.penalised.tolist()}

    def of(self, row: int) -> SamplingBatch:
        """One row, as the only one."""
        place = np.flatnonzero(self.penalised == row)
        return replace(
            self,
            **{name: getattr(self, name)[row : row + 1] for name in _COLUMNS_OF_ROWS},
            argmax_only=False,
            biases=self.biases.of(row),
            penalised=np.zeros(len(place), dtype=np.int64),
            history=self.history.of(int(place[0]) if place.size else -1),
        )


def uniform(sequence_seed: int, position: int) -> float:
    """The `position`-th double in [0, 1) of the Philox 4x64 stream (Salmon et al., SC'11) with this key."""
    return float(_uniforms(sequence_seed, position // _DRAWS)[position % _DRAWS])


@lru_cache(maxsize=8192)
def _uniforms(sequence_seed: int, block: int) -> Floats:
    """64 draws from block * 64 on, remembered because making a generator costs more. Philox gives 4 for each count.

    As an array: lists of floats take several times as much, and what is remembered grows until it is full.
    """
    generator = np.random.Philox(key=sequence_seed % 2**128, counter=block * _DRAWS // 4)
    draws: Floats = np.asarray((generator.random_raw(_DRAWS) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
    return draws


_COLUMNS_OF_ROWS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "uniforms", "top_logprobs",
)  # fmt: skip

_COLUMNS = attrgetter(
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "top_k",
)


def build_batch(rows: Sequence[SamplingRow]) -> SamplingBatch:
    """The arrays for one step; rows that are all greedy and ask for nothing else cost next to nothing."""
    argmax_only = all(row.params.argmax_only and not row.banned for row in rows)
    if argmax_only:
        columns = np.repeat([[0.0], [1.0], [0.0], [1.0], [1.0], [0.0], [0.0], [0.0]], len(rows), axis=1)
    else:
        columns = np.array([_COLUMNS(row.params) for row in rows], dtype=np.float64).T
    temperature, top_p, min_p, typical_p, repetition, frequency, presence, top_k = columns
    penalised = [] if argmax_only else [row for row, each in enumerate(rows) if each.params.penalises]
    return SamplingBatch(
        argmax_only=argmax_only,
        temperature=temperature,
        top_k=top_k.astype(np.int64),
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        uniforms=np.zeros(len(rows)) if argmax_only else np.array([_draw_for(row) for row in rows]),
        top_logprobs=np.full(len(rows), -1) if argmax_only else np.array([_top_logprobs(row.params) for row in rows]),
        biases=_bias_entries([] if argmax_only else rows),
        penalised=np.array(penalised, dtype=np.int64),
        history=_history_entries([rows[row] for row in penalised]),
    )


def _draw_for(row: SamplingRow) -> float:
    return uniform(row.sequence_seed, row.position) if row.params.temperature > 0 else 0.0


def _top_logprobs(params: SamplingParams) -> int:
    """best_of ranks completions by the chosen tokens' log-probabilities, asked for or not."""
    if params.logprobs is not None:
        return params.logprobs
    return 0 if params.sequences > params.n else -1


def _bias_entries(rows: Sequence[SamplingRow]) -> TokenEntries:
    cells = [(row, token, bias) for row, each in enumerate(rows) for token, bias in each.params.logit_bias.items()]
    cells += [(row, token, -np.inf) for row, each in enumerate(rows) for token in each.banned]
    row, token, bias = np.array(cells, dtype=np.float64).reshape(-1, 3).T
    return TokenEntries(row.astype(np.int64), token.astype(np.int64), bias.astype(np.float32))


def _history_entries(rows: Sequence[SamplingRow]) -> TokenEntries:
    """Prompt and output alternate in `parts`; a prompt matters to the repetition penalty alone."""
    parts: list[Integers] = []
    for row in rows:
        prompt = row.prompt_ids if row.params.repetition_penalty != 1 else ()
        parts += [np.asarray(prompt, dtype=np.int64), np.asarray(row.output_ids, dtype=np.int64)]
    row_of, generated = np.divmod(np.repeat(np.arange(len(parts)), [len(part) for part in parts]), 2)
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    return TokenEntries(row_of, tokens, generated.astype(np.float32))
