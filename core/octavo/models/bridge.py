"""Attention and cache inside a transformers model: its layers call octavo, with no model code of ours.

What each layer wants (heads, scale, window, soft cap, sinks, slopes) is not read from a config, whose field names
differ from architecture to architecture: the model runs once on two tokens, and what its layers pass to their attention
function is written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.kv.scales import KVScales
from octavo.models import operators

ATTENTION_NAME = "octavo"
"""What a model's `attn_implementation` must be."""

_BOUND, _NUMBER = "_octavo_layer", "_octavo_number"
_HARMLESS = frozenset({"position_ids", "cache_position", "input_ids"})
"""Tensors that layers pass along although attention does not depend on them."""


class UnsupportedModel(ValueError):
    """A model that octavo cannot run, with the reason."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of its attention function."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads], a parameter of the model."""
    alibi_slopes: tuple[float, ...] | None


@dataclass(slots=True)
class AttentionGroup:
    """Layers that attend alike, with their backend, their cache, and the plan of the step that runs."""

    backend: AttentionBackend
    cache: Any
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    plan: Any = None

    def begin(self, batch: AttentionBatch, bucket: int | None = None) -> None:
        """Plan one step; its layers run next. `bucket`: see `AttentionBackend.plan`."""
        self.slots = batch.slots
        self.plan = self.backend.plan(batch, bucket)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class BoundLayer:
    """One layer's place in its group."""

    group: AttentionGroup
    layer: int
    scales: KVScales | None = None
    """Not applied here but by `attention`: a capture records what it does, and compiles it with what stands around."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[tokens, heads, size] and twice [tokens, kv_heads, size] -> [tokens, heads, size]."""
        group = self.group
        group.backend.layout.write(group.cache, self.layer, key, value, group.slots)
        return group.backend.attend(query, key, value, group.cache, group.plan, self.layer)


_calls: ContextVar[list[AttentionCall]] = ContextVar("calls")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; [1, heads, tokens, size] each, packed rows as one."""
    bound = cast("BoundLayer | None", module.__dict__.get(_BOUND))
    if bound is not None:
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        scales = bound.scales
        if scales is not None:
            query, (key, value) = scales.asking(query), scales.cached(key, value)
        if operators.is_capturing():
            output = operators.attention(query, key, value, module.__dict__[_NUMBER])
        else:
            output = bound(query, key, value)
        return (output if scales is None else scales.restored(output))[None], None
    _refuse(module, key, value, attention_mask, others)
    head_size = query.shape[-1]
    scale = head_size**-0.5 if scaling is None else float(scaling)
    call = AttentionCall(
        module, query.shape[1], key.shape[1], head_size, scale, sliding_window, softcap, s_aux, alibi_slopes
    )
    _calls.get().append(call)
    return torch.zeros_like(query).transpose(1, 2), None


def _refuse(module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, others: dict[str, Any]) -> None:
    layer = type(module).__name__
    if mask is not None:
        raise UnsupportedModel(f"{layer} masks attention in a way of its own (mask of shape {tuple(mask.shape)})")
    if getattr(module, "is_causal", True) is False or others.get("is_causal") is False:
        raise UnsupportedModel(f"{layer} is not causal: only decoder-only language models can be served")
    if value.shape[-1] != key.shape[-1]:
        raise UnsupportedModel(
            f"{layer} has keys of size {key.shape[-1]} and values of size {value.shape[-1]}: not served yet"
        )
    for name, given in others.items():
        if isinstance(given, Tensor) and name not in _HARMLESS:
            raise UnsupportedModel(
                f"{layer} passes {name} {tuple(given.shape)} to attention, which octavo would ignore"
            )


AttentionInterface.register(ATTENTION_NAME, attention)


def inspect(model: PreTrainedModel) -> list[AttentionCall]:
    """Run two tokens and say what each layer asks of attention, in order. Raises UnsupportedModel with the reason."""
    for module in model.modules():
        module.__dict__.pop(_BOUND, None)
    token = _calls.set([])
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False)
        calls = _calls.get()
    finally:
        _calls.reset(token)
    _check(model, calls)
    return calls


def _check(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [])
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise UnsupportedModel(
            f"{config.model_type} has {layers} layers, {len(calls)} of which call an attention function to replace"
        )
    window = getattr(config, "sliding_window", None)
    if window is None:
        return
    for number, call in enumerate(calls):
        kind = kinds[number] if kinds else "sliding_attention"
        if (kind == "sliding_attention") != (call.window is not None):
            raise UnsupportedModel(
                f"layer {number} of {config.model_type} is of kind {kind} (sliding_window {window}) but asks attention "
                f"for window {call.window}"
            )


def groups(
    calls: Sequence[AttentionCall], dtype: torch.dtype, kv_dtype: torch.dtype, batch_invariant: bool = False
) -> list[tuple[AttentionSpec, list[int]]]:
    """Layers that attend alike: each group's spec and its layers' numbers. batch_invariant: as in `AttentionSpec`."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, call in enumerate(calls):
        kind = (
            call.heads,
            call.kv_heads,
            call.head_size,
            call.scale,
            call.window,
            call.softcap,
            call.sinks is not None,
            call.alibi_slopes,
        )
        alike.setdefault(kind, []).append(number)
    return [
        (
            AttentionSpec(
                layers=len(members), heads=heads, kv_heads=kv_heads, head_size=size, scale=scale, dtype=dtype,
                kv_dtype=kv_dtype, window=window, softcap=softcap, sinks=sinks, alibi_slopes=slopes,
                batch_invariant=batch_invariant,
            ),
            members,
        )
        for (heads, kv_heads, size, scale, window, softcap, sinks, slopes), members in alike.items()
    ]  # fmt: skip


def sinks(calls: Sequence[AttentionCall], members: Sequence[int]) -> Tensor | None:
    """[layers of the group, heads] float32, or None where its layers have none."""
    rows = [calls[member].sinks for member in members]
    return None if rows[0] is None else torch.stack([cast(Tensor, row).detach().float() for row in rows])


def bind(
    calls: Sequence[AttentionCall],
    members: Sequence[int],
    group: AttentionGroup,
    scales: Mapping[int, KVScales] | None = None,
) -> None:
    """From now on these layers attend through `group`; `scales`: of an fp8 cache, by a layer's number."""
    for layer, number in enumerate(members):
        bound = BoundLayer(group, layer, (scales or {}).get(number))
        calls[number].module.__dict__[_BOUND] = bound
        calls[number].module.__dict__[_NUMBER] = operators.register(bound)
