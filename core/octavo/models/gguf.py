"""GGUF files: what transformers' import of their tokenizer and end tokens loses, put back.

The names and values of the metadata are those of the GGUF specification (ggml/docs/gguf.md, section Tokenizer).
"""

from pathlib import Path
from typing import Any, cast

from gguf import GGUFReader
from tokenizers import decoders, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_KEYS = ("eos", "eot", "eom")
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>")
"""Tokens that end a text or a turn in every vocabulary that has them; a file names only one of its own."""

_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""Pre-tokenizers (`tokenizer.ggml.pre`) that split GPT-2's way, but each digit on its own."""


def read_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """Return the tokenizer of a GGUF file, and the ids that end generation."""
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    reader = GGUFReader(path)

    def metadata(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    if metadata("model") == "gpt2":  # byte-level byte-pair encoding, whichever model it is of
        _repair_byte_level(tokenizer, metadata("pre"))
    for name, key in _SPECIAL_TOKENS.items():
        index = metadata(f"{key}_token_id")
        setattr(tokenizer, f"{name}_token", None if index is None else tokenizer.convert_ids_to_tokens(int(index)))
    vocabulary = tokenizer.get_vocab()
    ends = {int(index) for key in _END_KEYS if (index := metadata(f"{key}_token_id")) is not None}
    return tokenizer, frozenset(ends | {vocabulary[token] for token in _END_TOKENS if token in vocabulary})


def _repair_byte_level(tokenizer: PreTrainedTokenizerFast, pre: str | None) -> None:
    """Undo what depends on the version of transformers: text comes back as it was, unknown bytes are left out."""
    tokenizer.clean_up_tokenization_spaces = False
    backend: Any = tokenizer.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token = None
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
