"""Drawing one token a row, by the inverse of the cumulative distribution."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SPAN = 256  # tokens whose weights are summed before the one that a draw falls on is sought among them
_TINY, _LOWEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).min


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
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


def plain_draw(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [rows]: of logits [rows, vocab] at temperature [rows] float32, without filters.

    uniforms: float64 [rows]. At temperature 0 all weights but those of the likeliest tokens vanish, and a uniform of 0
    falls on the first of these. All logits are read once: each span's weights are relative to its own largest.
    """
    vocab = logits.shape[-1]
    whole = vocab - vocab % _SPAN
    scale = temperature.clamp(min=_TINY)[:, None]
    peaks, totals = _spans(logits[:, :whole].view(len(logits), whole // _SPAN, _SPAN), scale)
    if whole < vocab:
        last_peak, last_total = _spans(logits[:, None, whole:], scale)
        peaks, totals = torch.cat([peaks, last_peak], -1), torch.cat([totals, last_total], -1)
    span, within = _locate(totals * ((peaks - peaks.amax(-1, keepdim=True)) / scale).exp(), uniforms)
    members = span[:, None] * _SPAN + torch.arange(_SPAN, device=logits.device)
    scores = _finite(logits.gather(-1, members.clamp(max=vocab - 1)))
    inside = ((scores - peaks.gather(-1, span[:, None])) / scale).exp().masked_fill(members >= vocab, 0)
    return (span * _SPAN + _locate(inside, within)[0]).clamp(max=vocab - 1)


def _spans(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [rows, spans, tokens] each span's largest, and its weights' sum relative to that: [rows, spans]."""
    scores = _finite(logits)
    peaks = scores.amax(-1)
    return peaks, ((scores - peaks[..., None]) / scale[..., None]).exp().sum(-1)


def _finite(logits: Tensor) -> Tensor:
    """In float32; the difference of two infinities would be no number, and a whole span may be -inf."""
    return logits.float().clamp(min=_LOWEST, max=-_LOWEST)


PlainDraw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `plain_draw`: logits [rows, vocab], temperature [rows] float32, uniforms [rows] float64 -> tokens [rows] int64."""


def compiled_draw(vocab: int, dtype: torch.dtype, device: torch.device) -> PlainDraw | None:
    """`plain_draw` as a few kernels, ready for any number of rows; None, with a warning, if that fails.

    Takes seconds, and runs within inference mode, as a step does: code is compiled for one mode.
    """
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # the compiler's, about itself
            draw: PlainDraw = torch.compile(plain_draw)
            for rows in (1, 2):
                logits = torch.zeros(rows, vocab, dtype=dtype, device=device)
                temperature, uniforms = torch.ones(rows, device=device), torch.zeros(rows, device=device).double()
                if rows > 1:
                    for tensor in (logits, temperature, uniforms):
                        torch._dynamo.mark_dynamic(tensor, 0)
                draw(logits, temperature, uniforms)
    except Exception as error:  # the compiler has no class of its own for what can go wrong in it
        logger.warning("tokens are drawn uncompiled: %s", " ".join(str(error).split())[:300])
        return None
    return draw
