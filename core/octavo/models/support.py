"""Which architectures octavo can serve, and why not the others."""

import re
import sys
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from octavo.models.alibi import ROUTED

_MODALITIES = re.compile("text|vision|audio|vq")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_MPT: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "logit_scale": (None,),
}
"""Settings of MPT that transformers' class passes over, with what it computes whatever they are."""


def refusals(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None) -> list[str]:
    """Sentences that say why a model cannot be served; none if it can.

    `model_class` is what transformers builds for causal language modelling from `config`, None if there is no such
    class. This looks before any weight is read; what only shows when layers run is `octavo.models.bridge.inspect`'s.
    """
    if reasons := _not_a_language_model(config, model_class):
        return reasons
    assert model_class is not None
    return [*_layer_refusals(config, model_class), *_attention_refusals(config, model_class)]


def _not_a_language_model(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None) -> list[str]:
    if parts := sorted(name for name in config.sub_configs if _MODALITIES.match(name)):
        return [
            f"its configuration has {' and '.join(parts)}: models of more than text are not served yet, nor is their "
            "text part alone"
        ]
    if getattr(config, "is_encoder_decoder", False):
        return ["it is an encoder-decoder model, octavo serves decoder-only language models"]
    if model_class is None:
        return ["transformers has no causal language model for it (AutoModelForCausalLM)"]
    return []


def _layer_refusals(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> list[str]:
    reasons = []
    if model_class._is_stateful:
        reasons.append(
            "it keeps a recurrent state (state-space, linear, convolutional layers), octavo keeps only keys and values"
        )
    if others := sorted(set(_value(config, "layer_types") or ()) - _LAYER_TYPES):
        reasons.append(f"it has layers of type {', '.join(others)}; served are {', '.join(sorted(_LAYER_TYPES))}")
    return reasons


def _attention_refusals(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> list[str]:
    reasons = []
    alibi = _uses_alibi(config, model_class)
    routed = alibi and model_class.__module__ in ROUTED
    if not (routed or model_class._supports_attention_backend):
        reasons.append(
            f"transformers' {model_class.__name__} does not call attention through the attention interface "
            "(_supports_attention_backend is false)"
        )
    if alibi and not routed:
        reasons.append(
            "it adds linear position biases (ALiBi), with which BLOOM and MPT are served, in a way of its own"
        )
    if config.model_type == "mpt" and routed:
        settings = vars(config) | vars(config.attn_config)
        reasons += [
            f"transformers' {model_class.__name__} passes over its {name}={settings[name]}"
            for name, computed in _MPT.items()
            if settings.get(name, computed[0]) not in computed
        ]
    if _value(config, "kv_lora_rank"):
        reasons.append(f"it has multi-head latent attention (kv_lora_rank={_value(config, 'kv_lora_rank')})")
    elif (values := _value(config, "v_head_dim")) and values != (keys := _value(config, "head_dim")):
        reasons.append(f"its values have another head size ({values}) than its keys ({keys})")
    return reasons


def _uses_alibi(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Tell by the helper in the model's module, and by the configuration where the model can do without."""
    builds = any("alibi" in name for name in vars(sys.modules[model_class.__module__]))
    return builds and bool(getattr(getattr(config, "attn_config", config), "alibi", True))


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a configuration value, None if absent or if layers differ in it (reading it would raise)."""
    if name in (config.per_layer_attributes or ()):
        return None
    return getattr(config, name, None)
