"""Loading: from folders, GGUF files and names, and the reasons for what is refused."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from octavo.models.bridge import UnsupportedModel
from octavo.models.load import load, load_random
from octavo.models.source import ModelNotFound
from octavo.models.support import refusals
from tests import checkpoints, gguf_files


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


def test_a_folder(llama: Path) -> None:
    loaded = load(llama, dtype=torch.float32, attention="sdpa", progress=False)
    theirs: Any = AutoModelForCausalLM.from_pretrained(llama)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name))
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a b")) == "a b"
    assert loaded.eos_token_ids == {checkpoints.EOS}
    assert (loaded.max_position, loaded.name, loaded.dtype) == (1024, str(llama), torch.float32)


@pytest.mark.parametrize("architecture", checkpoints.ARCHITECTURES)
def test_every_architecture_loads_with_any_attention_function(architecture: str, tmp_path: Path) -> None:
    loaded = load(checkpoints.make(architecture, tmp_path), attention="octavo", progress=False)
    assert loaded.config._attn_implementation == "octavo"
    assert loaded.max_position == 1024


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_dtype(llama: Path, dtype: torch.dtype | str, expected: torch.dtype) -> None:
    assert load(llama, dtype=dtype, attention="sdpa", progress=False).dtype == expected


def test_ends_come_from_all_three_places(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    loaded = load(folder, attention="sdpa", progress=False)
    assert loaded.eos_token_ids == {3, 5, 7, checkpoints.EOS}
    assert loaded.generation_config.eos_token_id == sorted(loaded.eos_token_ids)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path)
    for file in folder.glob("*token*"):
        file.unlink()
    assert load(folder, attention="sdpa", progress=False).tokenizer is None


def test_an_incomplete_checkpoint_names_what_is_missing(tmp_path: Path) -> None:
    file = checkpoints.make("llama", tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of its model, model.layers.1.mlp.up_proj.weight"):
        load(tmp_path, attention="sdpa", progress=False)


def test_weights_of_other_shapes_are_named(tmp_path: Path) -> None:
    file = checkpoints.make("llama", tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 weights of other shapes than its model, model.norm.weight \(5,\) instead of"
    ):
        load(tmp_path, attention="sdpa", progress=False)


def test_weights_that_are_not_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = checkpoints.make("llama", tmp_path) / "model.safetensors"
    weights = load_file(file) | {"model.layers.0.self_attn.k_scale": torch.ones(1)}  # octavo's affair
    save_file(weights, file, metadata={"format": "pt"})
    load(tmp_path, progress=False)
    assert not caplog.messages
    save_file(weights | {"model.extra.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    load(tmp_path, progress=False)
    assert "1 weights of" in caplog.text
    assert "are not used, model.extra.weight among them: transformers' LlamaForCausalLM does not" in caplog.text


def test_progress_and_silence(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(llama, attention="sdpa", progress=False)
    assert capfd.readouterr() == ("", "")
    load(llama, attention="sdpa", progress=True)
    output = capfd.readouterr()
    assert output.out == ""
    assert "Loading weights" in output.err


def test_the_libraries_verbosity_is_put_back(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_tomorrow"}))
    log: Any = transformers_logging
    hub = logging.getLogger("huggingface_hub")
    before = log.get_verbosity(), hub.level
    log.set_verbosity_info()
    hub.setLevel(logging.INFO)
    try:
        load(llama, attention="sdpa", progress=False)
        assert (log.get_verbosity(), hub.level) == (logging.INFO, logging.INFO)
        with pytest.raises(UnsupportedModel):
            load(tmp_path, progress=False)
        assert (log.get_verbosity(), hub.level) == (logging.INFO, logging.INFO)
        assert log.is_progress_bar_enabled()
    finally:
        log.set_verbosity(before[0])
        hub.setLevel(before[1])


@pytest.fixture(scope="module")
def gguf_file(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf", pre="smollm")


@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_gguf_file(gguf_file: Path, llama: Path, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = gguf_file if named == "file" else gguf_file.parent
    loaded = load(path, dtype=torch.float32, attention="sdpa", progress=False)
    assert capfd.readouterr() == ("", "")
    theirs: Any = AutoModelForCausalLM.from_pretrained(llama)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, theirs(ids).logits)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_token_id == checkpoints.EOS
    assert loaded.eos_token_ids == {checkpoints.EOS}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(" x 12")) == " x 12"
    assert max(loaded.tokenizer.encode("<|endoftext|>")) < loaded.config.vocab_size
    assert len(loaded.tokenizer) == loaded.config.vocab_size


def test_gguf_files_that_begin_with_a_token(llama: Path, tmp_path: Path) -> None:
    for add in (True, False):
        path = gguf_files.write(llama, tmp_path / f"{add}.gguf", add_bos=add)
        tokenizer = load(path, attention="sdpa", progress=False).tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode("A")
        assert (len(ids), checkpoints.BOS in ids) == ((2, True) if add else (1, False))


def test_gguf_tokenizers_split_digits_where_their_file_says_so(llama: Path, tmp_path: Path) -> None:
    pieces = {}
    for pre in ("smollm", "gpt-2"):
        loaded = load(gguf_files.write(llama, tmp_path / f"{pre}.gguf", pre=pre), attention="sdpa", progress=False)
        backend: Any = loaded.tokenizer
        split = backend.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12")
        pieces[pre] = [piece for piece, _ in split]
    assert pieces == {"smollm": ["a", "Ġ", "1", "2"], "gpt-2": ["a", "Ġ12"]}


def test_several_gguf_files_are_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"has 2 GGUF files; name one: a.gguf, b.gguf"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "nowhere.gguf", Path("nowhere")])
def test_a_path_that_is_not_there(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=f"no model at {Path(name).absolute()}; give a folder"):
        load(name)


def test_an_empty_folder_and_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither a config.json nor a .gguf file"):
        load(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"neither a folder nor a .gguf file"):
        load(tmp_path / "model.bin")


def test_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"hub's someone/no-such-model could not be had .*hf download"):
        load("someone/no-such-model")
    assert time.monotonic() - started < 30  # offline means that nothing is retried


def test_random_weights_for_a_configuration(llama: Path) -> None:
    first, again, other = (
        load_random(llama, dtype=torch.bfloat16, seed=seed, attention="sdpa").model for seed in (0, 0, 1)
    )
    weights = [model.get_parameter("lm_head.weight") for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.dtype == torch.bfloat16
    assert not first.training
    loaded = load_random(AutoConfig.from_pretrained(llama), dtype=torch.float32, attention="sdpa")
    assert (loaded.tokenizer, loaded.eos_token_ids) == (None, frozenset())
    assert loaded.generation_config.eos_token_id is None


def test_random_weights_of_a_folder_and_of_a_file(llama: Path, tmp_path: Path) -> None:
    """Weights are no more needed than a tokenizer, which is read where there is one; it ends no answer."""
    of_checkpoint = load_random(llama, attention="sdpa")
    assert of_checkpoint.tokenizer is not None
    assert (of_checkpoint.eos_token_ids, of_checkpoint.dtype) == (frozenset(), torch.float32)
    (tmp_path / "config.json").write_text((llama / "config.json").read_text().replace("float32", "bfloat16"))
    (tmp_path / "small.json").write_text((tmp_path / "config.json").read_text())
    for place in (tmp_path, tmp_path / "small.json", str(tmp_path)):
        loaded = load_random(place, attention="sdpa")
        assert (loaded.tokenizer, loaded.dtype, loaded.name) == (None, torch.bfloat16, str(place))


def test_random_weights_need_a_configuration_at_hand(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    for place in ("owner/model", tmp_path, tmp_path / "nowhere", tmp_path / "tiny.gguf"):
        with pytest.raises(ModelNotFound, match=f"no configuration at {Path(place).absolute()}, and random weights"):
            load_random(place)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(OSError, match=r"broken\.json' is not a valid JSON file"):
        load_random(tmp_path / "broken.json")
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        load_random(tmp_path)


def test_random_weights_leave_the_random_state_alone(llama: Path) -> None:
    state = torch.get_rng_state()
    load_random(llama, dtype=torch.float32, seed=7, attention="sdpa")
    assert torch.equal(torch.get_rng_state(), state)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({}, "encoder-decoder"),
    "mamba": ({}, "recurrent state"),
    "rwkv": ({}, "recurrent state"),
    "qwen3_next": ({}, "linear_attention"),
    "jamba": ({}, "recurrent state"),
    "lfm2": ({"full_attn_idxs": [1], "num_hidden_layers": 2}, "layers of type conv"),
    "llama4_text": ({}, "chunked_attention"),
    "deepseek_v2": ({}, "kv_lora_rank=512"),
    "deepseek_v3": ({}, "kv_lora_rank=512"),
    "mimo_v2_flash": ({}, r"values have another head size \(128\) than its keys \(192\)"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "gpt_neo": ({}, "GPTNeoForCausalLM does not call attention through the attention interface"),
    "gemma3": ({}, "vision_config"),
    "llava": ({}, "vision_config"),
    "vit": ({}, "no causal language model"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_served_says_why(model_type: str, tmp_path: Path) -> None:
    values, reason = REFUSED[model_type]
    AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"\({model_type}\) cannot be served: .*{reason}"):
        load(tmp_path, progress=False)  # it has no weights: the refusal comes before they are looked for


def test_falcon_without_position_biases_has_one_reason_less() -> None:
    mapping: Any = AutoModelForCausalLM._model_mapping
    config = AutoConfig.for_model("falcon", alibi=False)
    model_class: type[PreTrainedModel] = mapping[type(config)]
    assert not any("ALiBi" in reason for reason in refusals(config, model_class))


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_tomorrow"}))
    with pytest.raises(UnsupportedModel, match=r"does not know the architecture.*from_tomorrow"):
        load(tmp_path, progress=False)


def test_a_configuration_that_makes_no_sense_to_transformers(tmp_path: Path) -> None:
    config = {"model_type": "mpt", "attn_config": {"attn_type": "grouped_query_attention"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"not take the configuration of .*got grouped_query_attention"):
        load(tmp_path, progress=False)


def test_foreign_code_is_not_run_unasked(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(UnsupportedModel, match="allow it to run with trust_remote_code"):
        load(tmp_path, progress=False)
