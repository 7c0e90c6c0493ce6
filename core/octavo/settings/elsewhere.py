"""Names that other servers have for settings, or that look like ours: those who set them are told, not passed over."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping

FORMER_NAMES = {"max_input_length": "max_input_tokens"}
"""Names that TGI gave up and still takes."""

_ELSEWHERE = {"ATTENTION_BACKEND": "ATTENTION", "VLLM_ATTENTION_BACKEND": "ATTENTION", "MODEL": "MODEL_ID"}
"""What other servers call it."""

_ONE_DEVICE = "a server runs on one device: start one for each, and a balancer that keeps a client with its server"
_CONFIGURATION = "write it into the checkpoint's config.json"
_NGROK = "run ngrok beside the server"
_NO_WATERMARK = "answers are not watermarked"

GONE = {
    "num_shard": _ONE_DEVICE,
    "sharded": _ONE_DEVICE,
    "shard_uds_path": "the engine's socket is in a folder that it makes for itself",
    "master_addr": "there are no shards to find each other",
    "master_port": "there are no shards to find each other",
    "quantize": "weights are not quantized while they are read: DTYPE is what they are computed in",
    "speculate": "nothing is guessed ahead: each step computes one token of a request",
    "xpu_memory_fraction": "TGI_WIGGLE_ROOM is the cache's share of free memory, MAX_BATCH_TOTAL_TOKENS its size",
    "prefill_chunking": "prompts are computed in chunks of MAX_BATCH_PREFILL_TOKENS wherever the attention backend can",
    "enable_prefill_logprobs": "decoder_input_details works by itself",
    "disable_custom_kernels": "ATTENTION=reference is attention in plain PyTorch, COMPILE=0 the model as it is",
    "disable_grammar_support": "a start takes about a second to be ready for them; uninstall llguidance to have none",
    "rope_scaling": _CONFIGURATION,
    "rope_factor": _CONFIGURATION,
    "tokenizer_config_path": "put the file into the checkpoint's folder, as tokenizer_config.json",
    "huggingface_hub_cache": "set the variable HF_HUB_CACHE",
    "weights_cache_override": "give the folder with the checkpoint as the model",
    "lora_adapters": "adapters are not served: merge the adapter into its model and serve that",
    "watermark_gamma": _NO_WATERMARK,
    "watermark_delta": _NO_WATERMARK,
    "max_image_fetch_size": "prompts are text only",
    "prometheus_port": "metrics are at /metrics on PORT",
    "ngrok": _NGROK,
    "ngrok_authtoken": _NGROK,
    "ngrok_edge": _NGROK,
    "usage_stats": "nothing is reported to anybody",
    "env": "octavo settings and octavo backends print what a report needs",
}
"""TGI's settings that are not here, and what to do instead."""

_ALSO_OF_OTHERS = frozenset({"env", "huggingface_hub_cache", "master_addr", "master_port"})
"""Those whose variables other programs read: that they are set says nothing."""
_NO_MISTAKE = frozenset({"LOG_FORMAT"})
"""Variables of other programs that only look like one of ours (LOAD_FORMAT)."""


def without_effect(environment: Mapping[str, str], settings: Collection[str]) -> Iterator[str]:
    """A sentence for each variable that is set, looks meant for a server, and is read by none of the settings."""
    for name in sorted(environment):
        if name.lower() in GONE and name.lower() not in _ALSO_OF_OTHERS:
            yield f"the variable {name} has no effect: {GONE[name.lower()]}"
    for name, right in misspelt_variables(environment, settings):
        yield f"the variable {name} has no effect, did you mean {right}?"


def gone_flag(word: str) -> str | None:
    """What to do instead of a flag of TGI's, if the word is one that is not here."""
    bare = word.partition("=")[0]
    instead = GONE.get(bare.removeprefix("--").replace("-", "_")) if bare.startswith("--") else None
    return None if instead is None else f"{bare} is not a flag of octavo: {instead}"


def misspelt_variables(environment: Mapping[str, str], settings: Collection[str]) -> Iterator[tuple[str, str]]:
    """Variables that are set and look meant for one of the settings, each with the variable that is read."""
    right = {name.upper() for name in (*settings, *FORMER_NAMES)}
    long_enough = [name for name in right if len(name) >= 8]
    for name in sorted(environment):
        if name.upper() in right | _NO_MISTAKE or name.lower() in GONE:
            continue
        bare = name.upper().removeprefix("OCTAVO_").removeprefix("TGI_").removeprefix("VLLM_")
        close = difflib.get_close_matches(bare, long_enough, n=1, cutoff=0.84)
        if name in _ELSEWHERE:
            yield name, _ELSEWHERE[name]
        elif bare in right:
            yield name, bare
        elif close:
            yield name, close[0]
