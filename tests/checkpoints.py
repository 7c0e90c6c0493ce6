"""Tiny random checkpoints, one per architecture, for tests: seeded, fp32, saved as ordinary folders."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from octavo.models.quiet import quiet

EOS, BOS, PAD, VOCABULARY = 256, 257, 258, 260

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "dtype": "float32",
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "sliding_window": 24,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "sliding_window": 24,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
    },
    "phi3": {"original_max_position_embeddings": 1024},
    "gpt_oss": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 256,
        },
    },
    "olmo2": {},
    "gpt2": {},
    "starcoder2": {"sliding_window": 24, "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
    },
    "cohere": {"logit_scale": 0.5, "use_qk_norm": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "bloom": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "seq_length": 1024},
    "mpt": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_seq_len": 1024,
        "attn_config": {"clip_qkv": 3.0, "softmax_scale": 0.2},
    },
}

ARCHITECTURES: tuple[str, ...] = tuple(_OVERRIDES)
"""Every architecture that `make` knows, by transformers' `model_type`."""


def make(architecture: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random fp32 checkpoint with a byte-level tokenizer into `folder`; `overrides` go into its config."""
    with torch.random.fork_rng(devices=[]):
        model = build(architecture, **{**_COMMON, **_OVERRIDES[architecture], **overrides})
        torch.manual_seed(seed)
        _randomize(model)
    return save(model, byte_tokenizer(), folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte (ids 0 to 255), then end, begin and padding; it has a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>", "<pad>"])
    fast = _fast(tokenizer, eos_token="<end>", bos_token="<begin>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return fast


def counting_model(folder: Path, vocab: int = 512) -> Path:
    """Save a Llama whose weights make it count upward, modulo `vocab`, from whatever its prompt counts.

    The answer is read from the cache alone. Attention averages the one-hot values of all positions into a histogram h,
    and the logit of n is 4·vocab·(h[n−1] − h[n]): positive only behind the end of the interval counted so far. The
    last token itself votes by −1 against its successor and by +1 for itself, so that a gap or a stranger anywhere in
    the history beats the true successor. All true keys score −16: a zero key (a slot never written, or read behind
    the end) outweighs them all. Only the loss of the first tokens' values alone goes unseen, for what is left counts.
    Contexts are shorter than `vocab`; `vocab` is a multiple of 128. fp32 is needed.
    """
    model = build(
        "llama",
        vocab_size=vocab,
        hidden_size=vocab + 8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=vocab // 64,
        num_key_value_heads=vocab // 128,
        head_dim=128,
        max_position_embeddings=vocab - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.no_grad():
        _write_counting_weights(model, vocab)
    return save(model, number_tokenizer(vocab), folder)


def _write_counting_weights(model: PreTrainedModel, vocab: int) -> None:
    head_size, hidden = 128, vocab + 8
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    one_hot = torch.eye(vocab)
    embedding = model.get_parameter("model.embed_tokens.weight")
    embedding[:, :vocab] = one_hot
    embedding[:, vocab] = 1.0  # what queries and keys are made of, whatever the token
    unit = (2 / hidden) ** 0.5  # undoes the norm's scale
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        # The last pair of rotary dimensions has a frequency of 1e-12: no rotation, so that every key scores −16.
        model.get_parameter(f"{layer}.q_proj.weight")[head_size - 1 :: head_size, vocab] = unit * -16 * head_size**0.5
        model.get_parameter(f"{layer}.k_proj.weight")[head_size - 1 :: head_size, vocab] = unit
    # The first layer's values are wrong on purpose and go nowhere: a cache that mixes up layers shows.
    model.get_parameter("model.layers.0.self_attn.v_proj.weight")[:, :vocab] = unit * one_hot.flip(0)
    model.get_parameter("model.layers.1.self_attn.v_proj.weight")[:, :vocab] = unit * one_hot
    grouped = one_hot.view(vocab, vocab // head_size, 1, head_size).expand(-1, -1, 2, -1).reshape(vocab, 2 * vocab)
    model.get_parameter("model.layers.1.self_attn.o_proj.weight")[:vocab] = -2.0 * vocab * grouped  # 2 heads a group
    model.get_parameter("lm_head.weight")[:, :vocab] = one_hot - one_hot.roll(1, dims=0)


def number_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(tokenizer)


def _randomize(model: PreTrainedModel) -> None:
    """Scale the weights so that greedy tokens vary, and depend on far tokens through peaked attention."""
    embedding_scale = 0.05 if model.config.tie_word_embeddings else 0.5  # larger tied ones repeat the last token
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # query norms get a larger mean, since they alone set how peaked attention is
                parameter.add_(0.2 * torch.randn_like(parameter) + (2.0 if "q_norm" in name else 0.0))
            elif "embed" in name or "wte" in name or "wpe" in name:
                nn.init.normal_(parameter, std=embedding_scale)
            else:
                nn.init.normal_(parameter, std=3.0 * min(parameter.shape[-2:]) ** -0.5)


def build(architecture: str, **values: Any) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(architecture, **values), dtype=torch.float32)
    return model


def _fast(tokenizer: Tokenizer, **tokens: str) -> PreTrainedTokenizerFast:
    wrap: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = wrap(tokenizer_object=tokenizer, **tokens)
    return fast


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    with quiet(progress=False):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
