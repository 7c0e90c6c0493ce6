"""The truth: float64 attention over an unpaged history, and how far an answer is from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec


class Fault(AssertionError):
    """What a backend does wrong, in a sentence."""


class Deviation(NamedTuple):
    """How far an answer is from the truth."""

    error: float
    """Relative error |answer - truth| / |truth| of the worst token."""
    correlation: float
    """Cosine of the angle between answer and truth, of the worst head of the worst token. Heads that are less than a
    thousandth of their token are not among them: what a sink leaves of a head may be no more than rounding."""

    def worse(self, other: Deviation) -> Deviation:
        """The worse of each."""
        return Deviation(max(self.error, other.error), min(self.correlation, other.correlation))


EXACT = Deviation(0.0, 1.0)

LIMITS = {
    torch.float32: Deviation(1e-5, 1 - 1e-9),
    torch.float16: Deviation(2e-3, 1 - 1e-5),
    torch.bfloat16: Deviation(1e-2, 1 - 1e-4),
}
"""What rounding may do, by the dtype of the output. Both are judged: the error is blind to one wrong head among many
in a low precision, the correlation to a wrong scale."""
ONE_BYTE_CACHE = Deviation(6e-2, 1 - 2e-3)
"""A cache of one byte an element may keep scales of its own, so that exact inputs are rounded too."""
SCALED = Deviation(3e-2, 1 - 1e-3)
"""Beside core's scales a cache of one byte needs none of its own."""
LARGE_LOGITS = Deviation(3e-2, 1 - 1e-3)
"""Logits near 1e5 have steps of 0.008 in fp32: the weights are off by as much."""


def limit(spec: AttentionSpec) -> Deviation:
    """What a correct backend stays within, for ordinary logits."""
    rounding = LIMITS.get(spec.dtype, LIMITS[torch.bfloat16])
    return rounding.worse(ONE_BYTE_CACHE) if spec.kv_dtype.itemsize == 1 else rounding


def attention(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, *, spec: AttentionSpec) -> Tensor:
    """Causal attention of the last tokens of one history to all of it, in float64.

    query: [new, heads, head_size]; keys, values: [context, kv_heads, head_size]; sinks: [heads], each a logit that
    carries no value. Returns [new, heads, head_size], where they are.
    """
    context, group = keys.shape[0], spec.group
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    logits = spec.scale * torch.einsum("qhd,khd->hqk", query.double(), keys)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    seen_from = torch.arange(context - query.shape[0], context, device=query.device).unsqueeze(1)
    behind = seen_from - torch.arange(context, device=query.device)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float64, device=query.device)
        logits = logits - slopes[:, None, None] * behind
    visible = (behind >= 0) & (behind < (spec.window or context))
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, query.shape[0], 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1)[..., :context], values)


def deviation(answer: Tensor, truth: Tensor) -> Deviation:
    """Of an answer [tokens, heads, head_size] in any dtype from a truth of this shape in float64."""
    if not truth.numel():
        return EXACT
    answer = answer.detach().cpu().double()
    if not answer.isfinite().all():
        return Deviation(torch.inf, -1.0)
    size = truth.flatten(1).norm(dim=1)
    error = (answer - truth).flatten(1).norm(dim=1) / size
    correlation = torch.cosine_similarity(answer, truth, dim=-1)
    correlation[truth.norm(dim=-1) < 1e-3 * size[:, None]] = 1.0
    return Deviation(float(error.max()), float(correlation.min()))


def judge(found: Deviation, allowed: Deviation, what: str, explanation: Callable[[], str] = str) -> None:
    """Raise Fault, which begins with `what` and ends with the explanation, unless both are within the limit."""
    if found.error == torch.inf:
        raise Fault(f"{what}: not finite")
    if found.worse(allowed) != allowed:
        raise Fault(
            f"{what}: error {found.error:.2g} (limit {allowed.error:g}), "
            f"correlation {found.correlation:.6f} (limit {allowed.correlation:.9g}){explanation()}"
        )
