"""Drawing one token a row, by the inverse of the cumulative distribution."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SPAN = 256  # tokens whose weights are summed before the one that a draw falls on is sought among them
_TINY = torch.finfo(torch.float32).tiny


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
    falls on the first of these.
    """
    scores = logits.float()
    weights = ((scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=_TINY)[:, None]).exp()
    return inverse_cdf(weights, uniforms)


PlainDraw = Callable[[Tensor, Tensor, Tensor], Tensor]


def compiled_draw(vocab: int, dtype: torch.dtype, device: torch.device) -> PlainDraw | None:
    """`plain_draw` in two passes over the logits, ready for any number of rows; None, with a warning, if that fails.

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
