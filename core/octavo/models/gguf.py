"""GGUF files: what transformers' import of their tokenizer and end tokens loses, put back.

The names and values of the metadata are those of the GGUF specification (ggml/docs/gguf.md, section Tokenizer).
"""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_KEYS = ("eos", "eot", "eom")
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>")
"""Tokens that end a text or a turn in every vocabulary that has them; a file names only one of its own."""

_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""Pre-tokenizers (`tokenizer.ggml.pre`) that split GPT-2's way, but each digit on its own."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def read_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, frozenset[int]]:
    """Return the tokenizer of a GGUF file, and the ids that end generation."""
    imported: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reader = GGUFReader(path)

    def metadata(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    parts = json.loads(imported.backend_tokenizer.to_str())
    # The class that transformers picks adds special tokens of its own: ids for which the model has no embedding.
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < len(metadata("tokens"))]
    if metadata("model") == "gpt2":  # byte-level byte-pair encoding, whichever model it is of
        _repair_byte_level(parts, metadata("pre"))
    backend = Tokenizer.from_str(json.dumps(parts))
    ids = {name: metadata(f"{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    special = {name: imported.convert_ids_to_tokens(int(index)) for name, index in ids.items() if index is not None}
    if metadata("add_bos_token") and "bos" in special:
        begin: Any = processors.TemplateProcessing
        backend.post_processor = begin(f"{special['bos']} $A", special_tokens=[(special["bos"], int(ids["bos"]))])
    wrap: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = wrap(
        tokenizer_object=backend,
        chat_template=imported.chat_template,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )
    vocabulary = tokenizer.get_vocab()
    ends = {int(index) for key in _END_KEYS if (index := metadata(f"{key}_token_id")) is not None}
    return tokenizer, frozenset(ends | {vocabulary[token] for token in _END_TOKENS if token in vocabulary})


def _repair_byte_level(parts: dict[str, Any], pre: str | None) -> None:
    """Undo what depends on the version of transformers; `parts` are those of a tokenizer.json."""
    parts["decoder"] = _BYTE_LEVEL
    parts["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    if pre in _SINGLE_DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, _BYTE_LEVEL]}
