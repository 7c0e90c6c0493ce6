"""Models with linear position biases (ALiBi, arXiv 2108.12409) whose own modules compute attention, BLOOM and MPT.

Their attention modules get another `forward`, which calls octavo's attention with a slope for each head, where theirs
adds a tensor of biases. Slopes are float32 whatever the model's dtype, to which transformers rounds each bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.models.bridge import attention

Slopes = tuple[float, ...]


def _bloom(layer: Any, slopes: Slopes, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    output, weights = attention(layer, query, key, value, None, scaling=layer.inv_norm_factor, alibi_slopes=slopes)
    return layer.dense(output.flatten(-2)) + residual, weights


def _mpt(layer: Any, slopes: Slopes, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    mixed = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        mixed = mixed.clamp(-layer.clip_qkv, layer.clip_qkv)
    split = (part.unflatten(-1, (layer.n_heads, layer.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
    query, key, value = split
    output, weights = attention(layer, query, key, value, None, scaling=layer.softmax_scale, alibi_slopes=slopes)
    return layer.out_proj(output.flatten(-2)), weights


ROUTED: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "transformers.models.bloom.modeling_bloom": ("BloomAttention", _bloom),
    "transformers.models.mpt.modeling_mpt": ("MptAttention", _mpt),
}
"""By the module of a model's class: the class of its layers that attend, and what they compute instead."""


def route(model: PreTrainedModel) -> None:
    """Have the layers of such a model call octavo's attention; any other is left as it is."""
    if type(model).__module__ not in ROUTED:
        return
    name, forward = ROUTED[type(model).__module__]
    slopes = _slopes(model)
    for module in model.modules():
        if type(module).__name__ == name:
            vars(module)["forward"] = partial(forward, module, slopes)
        elif hasattr(module, "slow_but_exact"):  # BLOOM's: slices of weights, which `pack` may have reordered
            vars(module)["slow_but_exact"] = False
    if forward is _mpt:  # which converts its mask, and so needs one: what has four axes is taken for one that is made
        vars(model)["forward"] = partial(model.forward, attention_mask=torch.zeros(1, 1, 1, 1))


def _slopes(model: PreTrainedModel) -> Slopes:
    """By transformers' formulas: what a key is worth more than the one before it."""
    base: Any = model.base_model
    if hasattr(base, "build_alibi_tensor"):
        biases: Tensor = base.build_alibi_tensor(torch.ones(1, 2), base.num_heads, torch.float32)
    else:
        biases = base.build_mpt_alibi_tensor(base.num_heads, 2, model.config.attn_config.alibi_bias_max)
    return tuple((biases[..., 1] - biases[..., 0]).flatten().tolist())
