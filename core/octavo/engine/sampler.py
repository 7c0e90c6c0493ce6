"""From logits to the next tokens: a batch of plain arrays in, token ids out.

The steps, in order: logit biases and bans; repetition, frequency and presence penalties; logits processors. Then the
argmax, or for rows that draw: temperature, top-k, top-p, min-p, typical-p, and one draw by inverse CDF.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from octavo.engine.drawing import PlainDraw, inverse_cdf
from octavo.engine.sampled import Sampled
from octavo.engine.sampling_batch import Integers, SamplingBatch, TokenEntries
from octavo.engine.sampling_filters import apply_filters
from octavo.engine.transfer import column, tensor, upload
from octavo.hooks import LogitsProcessor

_LOGPROB_ROWS = 256  # rows whose logits are held in float32 at once
_ALIGNED = 16  # elements of float32: no kernel looks further for where a row begins


@dataclass(slots=True)
class Chosen:
    """As `Sampled`, on the device: nothing has waited for it."""

    token_ids: Tensor
    """int64 [rows]."""
    rows: int
    asked: Integers
    """Rows that want log-probabilities, int64."""
    wanted: Integers
    """How many of the likeliest tokens each of them wants."""
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None
    """Of those rows, as `TokenLogprobs`."""
    failed: dict[int, BaseException] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """All that the host is told."""
        return [self.token_ids, *(self.logprobs or ())]

    def sampled(self, arrays: Sequence[npt.NDArray[Any]]) -> Sampled:
        """`tensors`, which have come to the host."""
        if self.logprobs is None:
            return Sampled(arrays[0], failed=self.failed)
        token_ids, asked_logprobs, asked_ids, asked_top = arrays
        logprobs = np.full(self.rows, np.nan, dtype=np.float32)
        logprobs[self.asked] = asked_logprobs
        top_ids = [np.empty(0, dtype=np.int64)] * self.rows
        top_logprobs = [np.empty(0, dtype=np.float32)] * self.rows
        for at, (row, count) in enumerate(zip(self.asked, self.wanted, strict=True)):
            top_ids[row], top_logprobs[row] = asked_ids[at, :count], asked_top[at, :count]
        return Sampled(token_ids, logprobs, top_ids, top_logprobs, self.failed)


class Sampler:
    """Chooses one token a row."""

    def __init__(self, draw: PlainDraw | None = None, invariant: bool = False) -> None:
        """`draw`: for batches in which no row wants more than a temperature; None: as the others.

        invariant: what a row gets is to depend to the bit on nothing but its own logits, request and `drawn` token.
        """
        self.draw = draw
        self.invariant = invariant

    def __call__(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]] = (),
    ) -> Sampled:
        """As `choose`; the answer is on the host."""
        chosen = self.choose(logits, batch, processors)
        return chosen.sampled([tensor.numpy(force=True) for tensor in chosen.tensors])

    def choose(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]] = (),
        drawn: Tensor | None = None,
    ) -> Chosen:
        """Choose from logits [rows, vocab] of any float dtype, which stay as they are.

        drawn: the tokens [rows] that a `PlainDraw` has given already, for rows that want no more. processors: (row,
        processor, the row's output ids). Log-probabilities are the model's own: the log-softmax in float32 of the
        unmodified logits. Temperature, penalties, filters and bans do not show in them. A row of NaN gives some id of
        the vocabulary. Raises ValueError if logits and batch differ in rows.
        """
        if logits.shape[0] != len(batch):
            raise ValueError(f"{logits.shape[0]} rows of logits for a batch of {len(batch)}: give one row per sequence")
        failed: dict[int, BaseException] = {}
        asked = np.flatnonzero(batch.top_logprobs >= 0)
        if drawn is not None and self.invariant:
            drawn = self._one_by_one(logits, batch, processors, drawn, failed)
        elif drawn is None or processors or not batch.temperature_only:
            drawn = self._tokens(logits, batch, processors, failed)
        chosen = Chosen(drawn, len(batch), asked, batch.top_logprobs[asked], failed=failed)
        if asked.size:
            index = tensor(asked, logits.device)
            asking = logits.index_select(0, index)
            most = int(chosen.wanted.max())
            chosen.logprobs = _token_logprobs(asking, chosen.token_ids[index], most, self.invariant)
        return chosen

    def _one_by_one(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]],
        drawn: Tensor,
        failed: dict[int, BaseException],
    ) -> Tensor:
        """`drawn`, and rows that want more as if each were the only one: how a sum is taken depends on how many are."""
        tokens = drawn.clone()
        for row in sorted(batch.wanting_more | {row for row, *_ in processors}):
            own = [(0, processor, output_ids) for of, processor, output_ids in processors if of == row]
            failure: dict[int, BaseException] = {}
            tokens[row] = self._tokens(logits[row : row + 1], batch.of(row), own, failure)[0]
            failed |= {row: failure[0]} if failure else {}
        return tokens

    def _tokens(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]],
        failed: dict[int, BaseException],
    ) -> Tensor:
        """int64 [rows]."""
        if batch.argmax_only and not processors:
            return logits.argmax(-1)
        if self.draw is not None and batch.temperature_only and not processors:
            temperature, uniforms = upload([batch.temperature.astype(np.float32), batch.uniforms], logits.device)
            return self.draw(logits, temperature, uniforms)
        scores = _modified(logits, batch, processors, failed)
        chosen = scores.argmax(-1)
        drawing = np.flatnonzero(batch.temperature > 0)
        if drawing.size:
            index = tensor(drawing, logits.device)
            chosen[index] = _draw(scores.index_select(0, index), batch, drawing)
        return chosen


def prompt_logprobs(
    logits: Tensor, next_token_ids: Integers, k: int, invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the prompt tokens that follow each position, under the model's raw distribution.

    logits [tokens, vocab] of any float dtype, next_token_ids int64 [tokens]; k: how many of the likeliest to add. What
    comes is a `TokenLogprobs` on the device. invariant: see `Sampler`.
    """
    return _token_logprobs(logits, tensor(next_token_ids, logits.device), k, invariant)


def _token_logprobs(logits: Tensor, token_ids: Tensor, k: int, invariant: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A few rows at a time: a whole prompt's logits in float32 would be the step's largest allocation by far."""
    k = min(k, logits.shape[-1])
    parts = []
    for start in range(0, max(1, len(logits)), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        scores = logits[rows].float()
        if invariant:  # how a sum is taken depends on where in memory its row begins
            scores = functional.pad(scores, (0, -scores.shape[-1] % _ALIGNED), value=-torch.inf)
        logprobs = scores.log_softmax(-1)
        if invariant and k:  # which of equals a search finds depends on how many are sought, and in how many rows
            top_values, top_ids = (part[:, :k] for part in logprobs.sort(descending=True, stable=True))
        else:
            top_values, top_ids = logprobs.topk(k)
        parts.append((logprobs.gather(-1, token_ids[rows, None])[:, 0], top_ids, top_values))
    chosen, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ids, values


def _modified(
    logits: Tensor,
    batch: SamplingBatch,
    processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]],
    failed: dict[int, BaseException],
) -> Tensor:
    """Logits in float32 after biases, bans, penalties and processors; a copy if there are any. Fills `failed`."""
    if not (batch.biases.rows.size or batch.penalised.size or processors):
        return logits.float()
    scores = logits.to(torch.float32, copy=True)
    index, values = _entries(batch.biases, scores)
    scores.index_put_(index, values, accumulate=True)
    if batch.penalised.size:
        _penalise(scores, batch)
    for row, processor, output_ids in processors:
        try:
            scores[row] = _processed(processor, output_ids, scores[row])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library in Rust, or sys.exit, is no Exception
            failed[row] = error
    return scores


def _processed(processor: LogitsProcessor, output_ids: Sequence[int], logits: Tensor) -> Tensor:
    processed = processor(output_ids, logits)
    if processed.shape != logits.shape:
        raise ValueError(f"{processor!r} returned logits of shape {tuple(processed.shape)}, not {tuple(logits.shape)}")
    return processed


def _penalise(scores: Tensor, batch: SamplingBatch) -> None:
    """Repetition as in arXiv 1909.05858 section 4.1; then count * frequency + (count > 0) * presence is subtracted."""
    rows = tensor(batch.penalised, scores.device)
    repetition, frequency, presence = (
        column(penalty[batch.penalised], scores.device)
        for penalty in (batch.repetition_penalty, batch.frequency_penalty, batch.presence_penalty)
    )
    before = scores.index_select(0, rows)
    index, generated = _entries(batch.history, scores)
    counts = torch.zeros_like(before).index_put_(index, generated, accumulate=True)
    seen = torch.zeros_like(before, dtype=torch.bool)
    seen[index] = True
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(seen, repeated, before) - counts * frequency - (counts > 0) * presence
    scores.index_copy_(0, rows, after)


def _draw(scores: Tensor, batch: SamplingBatch, rows: Integers) -> Tensor:
    """One token id for each row of scores [rows, vocab] float32, which are overwritten."""
    temperature = np.maximum(batch.temperature[rows], np.finfo(np.float32).tiny)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).div_(column(temperature, scores.device)).exp_()
    apply_filters(weights, batch, rows)
    return inverse_cdf(weights, tensor(batch.uniforms[rows], scores.device))


def _entries(entries: TokenEntries, scores: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Index and values of sparse entries; ids beyond the vocabulary can never be chosen and are left out."""
    inside = (entries.tokens >= 0) & (entries.tokens < scores.shape[-1])
    rows, tokens, values = (tensor(a[inside], scores.device) for a in (entries.rows, entries.tokens, entries.values))
    return (rows, tokens), values
