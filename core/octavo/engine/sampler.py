"""From logits to the next tokens: a batch of plain arrays in, token ids out.

The steps, in order: logit biases and bans; repetition, frequency and presence penalties; logits processors. Then the
argmax, or for rows that draw: temperature, top-k, top-p, min-p, typical-p, and one draw by inverse CDF.

A filter never cuts between tokens of equal logits: all that tie with the last one kept are kept. So what is kept does
not depend on how a sort orders ties, which are common in 16-bit logits, nor on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.engine.sampling_batch import Floats, Integers, SamplingBatch, TokenEntries
from octavo.hooks import LogitsProcessor

_LEADING = 256  # likeliest tokens among which a nucleus is sought before the whole vocabulary is sorted
_SPAN = 256  # tokens whose weights are summed before the one that a draw falls on is sought among them
_LOGPROB_ROWS = 256  # rows whose logits are held in float32 at once


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities float32 [tokens], and the k likeliest tokens, best first: int64 and float32 [tokens, k]."""

    logprobs: npt.NDArray[np.float32]
    top_token_ids: Integers
    top_logprobs: npt.NDArray[np.float32]


@dataclass(slots=True)
class Sampled:
    """The next tokens, int64 [rows], and log-probabilities under the model's raw distribution if a row asked for them.

    logprobs: float32 [rows], NaN where not asked. top_token_ids, top_logprobs: a row's are as long as it asked.
    """

    token_ids: Integers
    logprobs: npt.NDArray[np.float32] | None = None
    top_token_ids: list[Integers] | None = None
    top_logprobs: list[npt.NDArray[np.float32]] | None = None
    failed: dict[int, BaseException] = field(default_factory=dict)
    """Rows whose logits processor raised: their token means nothing."""


class Sampler:
    """Chooses one token a row."""

    def __call__(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        processors: Sequence[tuple[int, LogitsProcessor, Sequence[int]]] = (),
    ) -> Sampled:
        """Choose from logits [rows, vocab] of any float dtype, which stay as they are; the answer is on the host.

        processors: (row, processor, the row's output ids). Log-probabilities are the model's own: the log-softmax in
        float32 of the unmodified logits. Temperature, penalties, filters and bans do not show in them. A row of NaN
        gives some id of the vocabulary. Raises ValueError if logits and batch differ in rows.
        """
        if logits.shape[0] != len(batch):
            raise ValueError(f"{logits.shape[0]} rows of logits for a batch of {len(batch)}: give one row per sequence")
        if batch.argmax_only and not processors:
            return Sampled(logits.argmax(-1).numpy(force=True))
        failed: dict[int, BaseException] = {}
        scores = _modified(logits, batch, processors, failed)
        chosen = scores.argmax(-1)
        drawing = np.flatnonzero(batch.temperature > 0)
        if drawing.size:
            index = _tensor(drawing, logits.device)
            chosen[index] = _draw(scores.index_select(0, index), batch, drawing)
        sampled = _sampled(logits, chosen, batch)
        sampled.failed = failed
        return sampled


def prompt_logprobs(logits: Tensor, next_token_ids: Integers, k: int) -> TokenLogprobs:
    """Log-probabilities of the prompt tokens that follow each position, under the model's raw distribution.

    logits [tokens, vocab] of any float dtype, next_token_ids int64 [tokens]; k: how many of the likeliest to add.
    """
    return _token_logprobs(logits, _tensor(next_token_ids, logits.device), k)


def _token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> TokenLogprobs:
    """A few rows at a time: a whole prompt's logits in float32 would be the step's largest allocation by far."""
    k = min(k, logits.shape[-1])
    parts = []
    for start in range(0, max(1, len(logits)), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        logprobs = logits[rows].float().log_softmax(-1)
        top = logprobs.topk(k)
        parts.append((logprobs.gather(-1, token_ids[rows, None])[:, 0], top.indices, top.values))
    return TokenLogprobs(*(torch.cat(column).numpy(force=True) for column in zip(*parts, strict=True)))


def _sampled(logits: Tensor, chosen: Tensor, batch: SamplingBatch) -> Sampled:
    """`chosen` with log-probabilities for the rows that want them."""
    token_ids: Integers = chosen.numpy(force=True)
    asking = np.flatnonzero(batch.top_logprobs >= 0)
    if not asking.size:
        return Sampled(token_ids)
    index = _tensor(asking, logits.device)
    found = _token_logprobs(logits.index_select(0, index), chosen[index], int(batch.top_logprobs.max()))
    logprobs = np.full(len(batch), np.nan, dtype=np.float32)
    logprobs[asking] = found.logprobs
    top_ids = [np.empty(0, dtype=np.int64)] * len(batch)
    top_logprobs = [np.empty(0, dtype=np.float32)] * len(batch)
    for at, row in enumerate(asking):
        top_ids[row] = found.top_token_ids[at, : batch.top_logprobs[row]]
        top_logprobs[row] = found.top_logprobs[at, : batch.top_logprobs[row]]
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


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
    rows = _tensor(batch.penalised, scores.device)
    repetition, frequency, presence = (
        _column(penalty[batch.penalised], scores.device)
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
    weights = scores.sub_(scores.amax(-1, keepdim=True)).div_(_column(temperature, scores.device)).exp_()
    _filter(weights, batch, rows)
    return _inverse_cdf(weights, _tensor(batch.uniforms[rows], scores.device))


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The index in each row of weights [rows, vocab] at which its uniform [rows] falls: first the span, then in it."""
    vocab = weights.shape[-1]
    whole = vocab - vocab % _SPAN
    spans = weights[:, :whole].view(len(weights), whole // _SPAN, _SPAN).sum(-1)
    sums = torch.cat([spans, weights[:, whole:].sum(-1, keepdim=True)], -1)
    span, within = _locate(sums, uniforms)
    members = span[:, None] * _SPAN + torch.arange(_SPAN, device=weights.device)
    inside = weights.gather(-1, members.clamp(max=vocab - 1)).masked_fill_(members >= vocab, 0)
    return (span * _SPAN + _locate(inside, within)[0]).clamp_(max=vocab - 1)


def _locate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which a uniform falls, and how far into that weight, again from 0 to 1: both [rows].

    In float64: in float32 the rarest tokens of a large vocabulary would never come. A uniform of at most 1 - 2**-53
    stays below the total when it is multiplied, so what it falls on has some weight.
    """
    cumulative = weights.double().cumsum_(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    within = 1 - (cumulative.gather(-1, index) - target) / weights.gather(-1, index)
    return index[:, 0], within[:, 0].clamp_(min=0)


def _filter(weights: Tensor, batch: SamplingBatch, rows: Integers) -> None:
    """Zero what the rows' filters leave out; weights are probabilities scaled to make each row's largest 1."""
    vocab = weights.shape[-1]
    top_k, top_p = np.where(batch.top_k[rows] == 0, vocab, batch.top_k[rows]), batch.top_p[rows]
    ranked = np.flatnonzero((top_k < vocab) | (top_p < 1))
    if ranked.size:
        index = _tensor(ranked, weights.device)
        weights.index_copy_(0, index, _likeliest(weights.index_select(0, index), top_k[ranked], top_p[ranked]))
    min_p = batch.min_p[rows]
    if min_p.any():
        weights.masked_fill_(weights < _column(min_p, weights.device), 0)
    typical_p = batch.typical_p[rows]
    typical = np.flatnonzero(typical_p < 1)
    if typical.size:
        index = _tensor(typical, weights.device)
        weights.index_copy_(0, index, _typical(weights.index_select(0, index), typical_p[typical]))


def _likeliest(weights: Tensor, top_k: Integers, top_p: Floats) -> Tensor:
    """Apply top-k, then top-p to what it left; only rows whose nucleus reaches past the leading weights are sorted."""
    vocab = weights.shape[-1]
    limited = top_k < vocab
    width = min(vocab, max(int(top_k[limited].max(initial=1)), _LEADING if (top_p < 1).any() else 1))
    leading = weights.topk(width).values
    if limited.any():
        kth = leading.gather(-1, _tensor(np.minimum(top_k, width) - 1, weights.device)[:, None])
        kth.masked_fill_(_tensor(~limited, weights.device)[:, None], 0)
        weights.masked_fill_(weights < kth, 0)
    if (top_p == 1).all():
        return weights
    mass = weights.sum(-1, keepdim=True) * _tensor(top_p, weights.device)[:, None]
    smallest = _nucleus_edge(leading, mass)
    beyond = (leading.sum(-1, keepdim=True) < mass)[:, 0].nonzero()[:, 0]
    if beyond.numel():
        smallest[beyond] = _nucleus_edge(_descending(weights[beyond]), mass[beyond])
    return weights.masked_fill_(weights < smallest, 0)


def _nucleus_edge(descending: Tensor, mass: Tensor) -> Tensor:
    """The smallest weight [rows, 1] among the fewest leading ones that hold `mass` [rows, 1]."""
    last = torch.searchsorted(descending.double().cumsum_(-1), mass)
    return descending.gather(-1, last.clamp_(max=descending.shape[-1] - 1))


def _descending(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":  # numpy's vectorised sort takes a tenth of the time of torch's, which sorts pairs
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(descending=True).values


def _typical(weights: Tensor, typical_p: Floats) -> Tensor:
    """Apply locally typical sampling (arXiv 2202.00666): information closest to the entropy first."""
    probabilities = weights.double()
    probabilities /= probabilities.sum(-1, keepdim=True)
    entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
    distance = (probabilities.log() + entropy).abs()
    ascending, order = distance.sort(-1)
    reached = probabilities.gather(-1, order).cumsum(-1)
    needed = (reached < _tensor(typical_p, weights.device)[:, None]).sum(-1, keepdim=True)
    farthest = ascending.gather(-1, needed.clamp_(max=weights.shape[-1] - 1))
    return weights.masked_fill_(distance > farthest, 0)


def _entries(entries: TokenEntries, scores: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Index and values of sparse entries; ids beyond the vocabulary can never be chosen and are left out."""
    inside = (entries.tokens >= 0) & (entries.tokens < scores.shape[-1])
    rows, tokens, values = (_tensor(a[inside], scores.device) for a in (entries.rows, entries.tokens, entries.values))
    return (rows, tokens), values


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _column(values: Floats, device: torch.device) -> Tensor:
    """Values [rows] as float32 [rows, 1]."""
    return _tensor(values.astype(np.float32), device)[:, None]
