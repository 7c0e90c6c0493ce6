"""Filters of sampling: which tokens a row may draw.

A filter never cuts between tokens of equal logits: all that tie with the last one kept are kept. So what is kept does
not depend on how a sort orders ties, which are common in 16-bit logits, nor on what else is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.engine.sampling_batch import Floats, Integers, SamplingBatch
from octavo.engine.transfer import column, tensor

_LEADING = 256  # likeliest tokens among which a nucleus is sought before the whole vocabulary is sorted


def apply_filters(weights: Tensor, batch: SamplingBatch, rows: Integers) -> None:
    """Zero what the rows' filters leave out; weights are probabilities scaled to make each row's largest 1."""
    vocab = weights.shape[-1]
    top_k, top_p = np.where(batch.top_k[rows] == 0, vocab, batch.top_k[rows]), batch.top_p[rows]
    ranked = np.flatnonzero((top_k < vocab) | (top_p < 1))
    if ranked.size:
        index = tensor(ranked, weights.device)
        weights.index_copy_(0, index, _likeliest(weights.index_select(0, index), top_k[ranked], top_p[ranked]))
    min_p = batch.min_p[rows]
    if min_p.any():
        weights.masked_fill_(weights < column(min_p, weights.device), 0)
    typical_p = batch.typical_p[rows]
    typical = np.flatnonzero(typical_p < 1)
    if typical.size:
        index = tensor(typical, weights.device)
        weights.index_copy_(0, index, _typical(weights.index_select(0, index), typical_p[typical]))


def _likeliest(weights: Tensor, top_k: Integers, top_p: Floats) -> Tensor:
    """Apply top-k, then top-p to what it left; only rows whose nucleus reaches past the leading weights are sorted."""
    vocab = weights.shape[-1]
    limited = top_k < vocab
    width = min(vocab, max(int(top_k[limited].max(initial=1)), _LEADING if (top_p < 1).any() else 1))
    leading = weights.topk(width).values
    if limited.any():
        kth = leading.gather(-1, tensor(np.minimum(top_k, width) - 1, weights.device)[:, None])
        kth.masked_fill_(tensor(~limited, weights.device)[:, None], 0)
        weights.masked_fill_(weights < kth, 0)
    if (top_p == 1).all():
        return weights
    mass = weights.sum(-1, keepdim=True) * tensor(top_p, weights.device)[:, None]
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
    needed = (reached < tensor(typical_p, weights.device)[:, None]).sum(-1, keepdim=True)
    farthest = ascending.gather(-1, needed.clamp_(max=weights.shape[-1] - 1))
    return weights.masked_fill_(distance > farthest, 0)
