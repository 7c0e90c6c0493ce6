"""What a wrong answer is the right answer to: a fault that is known is found sooner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.conformance.truth import Deviation, attention, deviation

ALIKE = Deviation(2e-2, 1 - 2e-4)
"""Near enough to name it: in low precision a wrong answer is rounded as a right one is."""
COARSE = 5e-3
"""Relative error, as bfloat16 rounds: more has another cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One row of one layer in float64 on the CPU, as `attention` takes it, and the true answers around it."""

    query: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None
    spec: AttentionSpec
    truths: Tensor
    """[tokens, heads, head_size]: of all the step's tokens in this layer, rows of padding aside."""
    own: slice
    """The row's tokens among them."""


def explain(answer: Tensor, asked: Asked) -> str:
    """Behind a colon what `answer` [new, heads, head_size] looks like; nothing where it looks like nothing known."""
    answer = answer.detach().cpu().double()
    if not answer.isfinite().all():
        return ""
    for looks in (_other_attention, _multiple, _other_order, _other_tokens):
        if found := looks(answer, asked):
            return f": {found}"
    return ": right, but too coarse" if deviation(answer, asked.truths[asked.own]).error < COARSE else ""


def _is(answer: Tensor, other: Tensor, asked: Asked) -> bool:
    """Near it, and far nearer than to the truth, of which what is nearly right is near as well."""
    found = deviation(answer, other)
    return found.worse(ALIKE) == ALIKE and found.error * 4 < deviation(answer, asked.truths[asked.own]).error


def _multiple(answer: Tensor, asked: Asked) -> str | None:
    truth = asked.truths[asked.own]
    factor = float((answer * truth).sum() / truth.square().sum())
    return f"scaled by {factor:.3g}" if _is(answer, factor * truth, asked) else None


def _other_order(answer: Tensor, asked: Asked) -> str | None:
    """Heads, or the elements of each."""
    truth = asked.truths[asked.own]
    likeness = torch.cosine_similarity(answer[:, :, None], truth[:, None], dim=-1).mean(dim=0)
    order = likeness.argmax(dim=1)
    if len(order.unique()) == len(order) and _is(answer, truth[:, order], asked):
        return f"shuffled: its heads are those of the truth in the order {', '.join(map(str, order.tolist()))}"
    by_size = deviation(*(one.flatten(1).sort(dim=1)[0][:, None] for one in (answer, truth)))
    far = deviation(answer, truth).error > 0.5  # what is nearly right has nearly the same elements
    return "shuffled: its elements are the truth's in another order" if far and by_size.worse(ALIKE) == ALIKE else None


def _other_tokens(answer: Tensor, asked: Asked) -> str | None:
    """Each token's answer stands elsewhere in the step."""
    likeness = torch.cosine_similarity(answer.flatten(1)[:, None], asked.truths.flatten(1)[None], dim=-1)
    found = likeness.argmax(dim=1)
    if not _is(answer, asked.truths[found], asked):
        return None
    return f"shuffled: it answers tokens {', '.join(map(str, found.tolist()))} of the step"


def _other_attention(answer: Tensor, asked: Asked) -> str | None:
    return next((what for what, truth in _others(asked) if _is(answer, truth(), asked)), None)


def _others(asked: Asked) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What backends have computed in the place of what was asked for."""

    def attended(sinks: Tensor | None = asked.sinks, **changed: object) -> Tensor:
        spec = replace(asked.spec, **changed)  # type: ignore[arg-type]
        return attention(asked.query, asked.keys, asked.values, sinks, spec=spec)

    def of_keys(kept: slice) -> Tensor:
        return attention(asked.query, asked.keys[kept], asked.values[kept], asked.sinks, spec=asked.spec)

    spec, new, window = asked.spec, len(asked.query), asked.spec.window
    if spec.softcap is not None:
        yield "it is attention without the soft cap", lambda: attended(softcap=None)
    if window is not None:
        yield "it is attention without the window", lambda: attended(window=None)
        yield f"it is attention with a window of {window + 1}", lambda: attended(window=window + 1)
        if window > 1:
            yield f"it is attention with a window of {window - 1}", lambda: attended(window=window - 1)
    if asked.sinks is not None:
        yield "it is attention without the sinks", lambda: attended(sinks=None)
    if spec.alibi_slopes is not None:
        slopes = spec.alibi_slopes
        yield "it is attention without ALiBi", lambda: attended(alibi_slopes=None)
        yield "ALiBi favours distant keys", lambda: attended(alibi_slopes=tuple(-slope for slope in slopes))
        yield "the ALiBi slopes are of other heads", lambda: attended(alibi_slopes=slopes[::-1])
    yield "it is attention with scale 1", lambda: attended(scale=1.0)
    yield "it is attention with scale head_size ** -0.5", lambda: attended(scale=spec.head_size**-0.5)
    if len(asked.keys) > new:
        yield "no token sees its own key", lambda: of_keys(slice(-1))
        yield "it is attention to this step's keys alone", lambda: of_keys(slice(len(asked.keys) - new, None))
        yield "its causal mask begins at the top left", lambda: of_keys(slice(new))
    yield "query head h meets key head h mod kv_heads", lambda: _mixed_groups(asked)


def _mixed_groups(asked: Asked) -> Tensor:
    spec = asked.spec
    order = torch.arange(spec.heads).view(spec.group, spec.kv_heads).T.flatten()
    sinks = None if asked.sinks is None else asked.sinks[order]
    if spec.alibi_slopes is not None:
        spec = replace(spec, alibi_slopes=tuple(spec.alibi_slopes[head] for head in order))
    mixed = attention(asked.query[:, order], asked.keys, asked.values, sinks, spec=spec)
    return mixed[:, order.argsort()]
