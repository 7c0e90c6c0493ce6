"""A tokenizer that is read alone, against the one that AutoTokenizer finds beside the model's configuration."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from octavo.engine.process import _told
from octavo.models.load import load, load_random
from octavo.models.tokenizer import kind_of, read
from tests import checkpoints, gguf_files

CLASSES = {
    "llama": "LlamaTokenizer",
    "qwen3": "Qwen2Tokenizer",
    "cohere": "CohereTokenizer",
    "gpt2": "GPT2Tokenizer",
    "mistral": "PreTrainedTokenizerFast",
    "olmo2": "NobodysTokenizer",
    "phi3": None,
}
"""By architecture, what the tokenizer's configuration says of its class."""
TEXTS = ("Answer 42, please:  ümläüt", "<begin>a<end> b", "")


def tokenizer_files(folder: Path, architecture: str, named: str | None) -> Path:
    """As a checkpoint has them beside its configuration."""
    AutoConfig.for_model(architecture).save_pretrained(folder)
    checkpoints.byte_tokenizer().save_pretrained(folder)
    changed(folder / "tokenizer_config.json", tokenizer_class=named)
    return folder


def changed(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def behaviour(tokenizer: Any) -> tuple[object, ...]:
    """All that the server has of it."""
    turns = [{"role": "user", "content": "hello"}]
    return (
        json.loads(tokenizer.backend_tokenizer.to_str()),
        tokenizer.special_tokens_map,
        tokenizer.all_special_ids,
        tokenizer.chat_template and tokenizer.apply_chat_template(turns, tokenize=False),
        [dict(tokenizer(text, return_offsets_mapping=True)) for text in TEXTS],
        [
            tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=skip)
            for text in TEXTS
            for skip in (False, True)
        ],
    )


@pytest.mark.parametrize(("architecture", "named"), CLASSES.items())
def test_it_is_the_one_that_is_found_beside_the_model(architecture: str, named: str | None, tmp_path: Path) -> None:
    found = AutoTokenizer.from_pretrained(tokenizer_files(tmp_path, architecture, named))
    again = read(str(tmp_path), kind_of(found), revision=None, trust_remote_code=False)
    assert type(again) is type(found)
    assert behaviour(again) == behaviour(found)


def test_classes_are_told_apart(tmp_path: Path) -> None:
    """Read as another class the same files are another tokenizer: the name that is told does matter."""
    folder = str(tokenizer_files(tmp_path, "qwen3", "Qwen2Tokenizer"))
    found = AutoTokenizer.from_pretrained(folder)
    other = read(folder, "TokenizersBackend", revision=None, trust_remote_code=False)
    assert behaviour(other) != behaviour(found)


def test_code_beside_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tokenizer_files(tmp_path / "model", "llama", "OwnTokenizer")
    changed(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    found = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert type(found).__name__ == "OwnTokenizer"
    again = read(str(folder), kind_of(found), revision=None, trust_remote_code=True)
    assert type(again).__name__ == "OwnTokenizer"
    assert behaviour(again) == behaviour(found)


@pytest.mark.parametrize(("pre", "add_bos"), [("gpt-2", False), ("smollm", True)])
def test_a_gguf_file_is_handed_over_as_files(pre: str, add_bos: bool, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama")
    file = gguf_files.write(folder, tmp_path / "tiny.gguf", pre=pre, add_bos=add_bos)
    loaded = load(file, attention="sdpa", progress=False)
    told = _told(loaded, tmp_path / "shared").tokenizer
    assert told is not None
    file.unlink()  # it takes long to read: nobody does so again
    again = read(told.location, told.kind, revision=None, trust_remote_code=False)
    assert behaviour(again) == behaviour(loaded.tokenizer)


def test_what_is_told_of_a_checkpoint(tmp_path: Path) -> None:
    folder = checkpoints.make("qwen3", tmp_path)
    for loaded in (load(folder, attention="sdpa", progress=False), load_random(folder, attention="sdpa")):
        told = _told(loaded, Path("/nowhere")).tokenizer
        assert told is not None
        assert told.location == str(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert _told(load(folder, attention="sdpa", progress=False), Path("/nowhere")).tokenizer is None


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """Neither to be read nor to be used."""
    for architecture, named in CLASSES.items():
        tokenizer_files(tmp_path / architecture, architecture, named)
    kinds = {
        str(tmp_path / architecture): kind_of(AutoTokenizer.from_pretrained(tmp_path / architecture))
        for architecture in CLASSES
    }
    assert len({*kinds.values()}) > 2
    code = f"""
import sys
from octavo.models.tokenizer import read
for folder, kind in {kinds!r}.items():
    tokenizer = read(folder, kind, revision=None, trust_remote_code=False)
    text = tokenizer.apply_chat_template([{{"role": "user", "content": "hello"}}], tokenize=False)
    assert text and tokenizer.decode(tokenizer(text)["input_ids"])
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
