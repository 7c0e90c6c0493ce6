"""Scales of an fp8 cache as checkpoints hold them; transformers passes them over, so they are read from the files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from octavo.attention.contract import AttentionSpec
from octavo.kv.scales import KVScales, is_fp8
from octavo.models.bridge import AttentionCall, UnsupportedModel

logger = logging.getLogger(__name__)

_NAMES = {
    part: (
        f"{part}_scale",
        f"{part}_proj.{part}_scale",
        f"qkv_proj.{part}_scale",
        f"{part}_proj.output_scale",
        "kv_scale",
    )
    for part in ("k", "v")
}
"""Behind the name of a layer's attention, the first that is there: TGI's and vLLM's, ModelOpt's, its of a merged
projection, Quark's and older compressed-tensors', and AutoFP8's one for both."""
_COARSER = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), torch.float8_e5m2)
"""What holds larger numbers."""
ENDS = tuple({f".{name}" for names in _NAMES.values() for name in names})
"""Of their names."""


def find_scales(
    files: Sequence[Path],
    model: PreTrainedModel,
    calls: Sequence[AttentionCall],
    alike: Sequence[tuple[AttentionSpec, Sequence[int]]],
) -> dict[int, KVScales]:
    """By a layer's number, for the groups of layers in `alike`; none for a cache that is not fp8.

    `files`: the checkpoint's, of safetensors. Raises UnsupportedModel for a tensor that is no scale, with its name.
    """
    kv_dtype = alike[0][0].kv_dtype
    if not is_fp8(kv_dtype):
        return {}
    base = f"{model.base_model_prefix}."  # a checkpoint of the bare model leaves it out
    tensors = {name.removeprefix(base): (name, tensor) for name, tensor in _read(files).items()}
    layers = {module: name.removeprefix(base) for name, module in model.named_modules()}
    found = {}
    for spec, members in alike:
        for number in members:
            key, value = (_scale(tensors, layers[calls[number].module], part, spec.kv_heads) for part in ("k", "v"))
            if key is not None or value is not None:
                one, wider = torch.ones(1), _wider(kv_dtype)
                key, value = ((one if given is None else given * wider).to(model.device) for given in (key, value))
                found[number] = KVScales.of(key, value, spec)
    _tell(found, len(calls), kv_dtype)
    return found


def _wider(kv_dtype: torch.dtype) -> float:
    """By how much scales are larger where a cache ends sooner than e4m3fn, which checkpoints are calibrated for."""
    return max(1.0, torch.finfo(torch.float8_e4m3fn).max / torch.finfo(kv_dtype).max)


def _read(files: Sequence[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if name.endswith(ENDS)}  # noqa: SIM118
    return tensors


def _scale(tensors: Mapping[str, tuple[str, Tensor]], layer: str, part: str, kv_heads: int) -> Tensor | None:
    """[1] or [kv_heads] float32, or None where the checkpoint has none."""
    held = [tensors[f"{layer}.{name}"] for name in _NAMES[part] if f"{layer}.{name}" in tensors]
    if not held:
        return None
    name, tensor = held[0]
    if tensor.numel() not in (1, kv_heads):
        raise _refusal(name, f"of shape {tuple(tensor.shape)}", f"one number, or one for each of {kv_heads} key heads")
    scale = tensor.flatten().float()
    wrong = scale[~(scale.isfinite() & (scale > 0))]
    if len(wrong):
        raise _refusal(name, f"{wrong[0].item():g}", "finite and above 0")
    return scale


def _refusal(name: str, found: str, wanted: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} in the checkpoint is {found}: a scale of an fp8 cache is {wanted}. Mend the checkpoint, or set "
        "KV_CACHE_DTYPE=auto, which needs no scales"
    )


def _tell(found: Mapping[int, KVScales], layers: int, kv_dtype: torch.dtype) -> None:
    if found:
        each = any(len(part.unique()) > 1 for scales in found.values() for part in (scales.key, scales.value))
        which = "one for each head" if each else "one a layer"
        logger.info(
            "keys and values of %d of %d layers are scaled as the checkpoint says, %s", len(found), layers, which
        )
    elif kv_dtype in _COARSER:
        word, coarser = (str(dtype).removeprefix("torch.float8") for dtype in (kv_dtype, _COARSER[kv_dtype]))
        logger.warning(
            "there are no scales for the cache of fp8%s: keys and values beyond %g are cut to that; "
            "KV_CACHE_DTYPE=fp8%s holds up to %g, less exactly",
            word, torch.finfo(kv_dtype).max, coarser, torch.finfo(_COARSER[kv_dtype]).max,
        )  # fmt: skip
