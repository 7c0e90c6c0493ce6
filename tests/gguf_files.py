"""Tiny GGUF files, written from the tests' own checkpoints as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def write(folder: Path, path: Path, *, pre: str = "gpt-2", add_bos: bool = False) -> Path:
    """Write the Llama checkpoint in `folder` as fp32; `pre` names its pre-tokenizer."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, config.vocab_size, pre)
    writer.add_add_bos_token(add_bos)
    for name, weight in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, count in heads.items():
            if projection in name:
                weight = _interleave(weight, count)
        writer.add_tensor(_rename(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any, size: int, pre: str) -> None:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()} | {size - 1: "ab", 255: "abc"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    special = set(tokenizer.all_special_ids)
    writer.add_token_list([by_id[index] for index in range(size)])
    writer.add_token_types([TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(size)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)


def _interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rotary halves into pairs: llama.cpp rotates neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _rename(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
