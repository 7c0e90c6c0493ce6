"""Scales of an fp8 cache are found in checkpoints under the names that tools give them; bad ones are refused."""

from __future__ import annotations

import functools
import json
import logging
import operator
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.kv.scales import KVScales
from octavo.models.bridge import UnsupportedModel, groups, inspect
from octavo.models.kv_scales import find_scales
from octavo.models.load import load, load_random
from tests import checkpoints, gguf_files

LAYERS, HEADS, KV_HEADS = 3, 4, 2
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


def with_scales(checkpoint: Path, folder: Path, scales: dict[str, Tensor]) -> Path:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    save_file(load_file(checkpoint / "model.safetensors") | scales, folder / "model.safetensors", {"format": "pt"})
    return folder


def found_in(model: Path | str, kv_dtype: torch.dtype = E4M3) -> dict[int, KVScales]:
    loaded = load(model, dtype=torch.float32, progress=False)
    calls = inspect(loaded.model)
    return find_scales(loaded.files, loaded.model, calls, groups(calls, torch.float32, kv_dtype))


def numbers(scales: KVScales) -> tuple[list[float], list[float]]:
    """Of keys and values, a number for each key head."""
    assert torch.equal(scales.query, scales.key.repeat_interleave(HEADS // KV_HEADS, dim=0))
    assert torch.equal(scales.output, scales.value.repeat_interleave(HEADS // KV_HEADS, dim=0))
    return scales.key.flatten().tolist(), scales.value.flatten().tolist()


NAMES = {
    "TGI": ("k_scale", "v_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "merged": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (KV_HEADS,), (KV_HEADS, 1, 1)], ids=str)
def test_names_and_shapes(names: tuple[str, str], shape: tuple[int, ...], llama: Path, tmp_path: Path) -> None:
    written = {
        f"model.layers.{layer}.self_attn.{name}": (torch.rand(shape) + layer + part).to(torch.bfloat16)
        for layer in range(LAYERS)
        for part, name in enumerate(names)
    }
    found = found_in(with_scales(llama, tmp_path, written))
    assert sorted(found) == list(range(LAYERS))
    for layer, scales in found.items():
        for name, kept in zip(names, numbers(scales), strict=True):
            tensor = written[f"model.layers.{layer}.self_attn.{name}"].float()
            assert kept == tensor.flatten().expand(KV_HEADS).tolist()


def test_one_scale_for_both_is_what_is_left_where_there_are_no_others(llama: Path, tmp_path: Path) -> None:
    attention = "model.layers.{}.self_attn.{}".format
    found = found_in(
        with_scales(
            llama,
            tmp_path,
            {
                attention(0, "kv_scale"): torch.tensor(3.0),
                attention(1, "kv_scale"): torch.tensor(3.0),
                attention(1, "k_scale"): torch.tensor(5.0),
                attention(1, "v_scale"): torch.tensor(7.0),
                attention(2, "v_scale"): torch.tensor(9.0),
            },
        )
    )
    assert [numbers(found[layer]) for layer in range(LAYERS)] == [([3, 3], [3, 3]), ([5, 5], [7, 7]), ([1, 1], [9, 9])]


def test_a_cache_that_ends_sooner_has_larger_scales(llama: Path, tmp_path: Path) -> None:
    """What calibration made 448 of must become 240 there, where e4m3fnuz ends; e5m2 holds what it is given."""
    one = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(3.0) for layer in range(LAYERS)}
    folder = with_scales(llama, tmp_path, one)
    for kv_dtype, expected in ((torch.float8_e4m3fnuz, 3 * 448 / 240), (torch.float8_e5m2, 3.0)):
        for scales in found_in(folder, kv_dtype).values():
            assert [*functools.reduce(operator.iadd, numbers(scales), [])] == pytest.approx([expected] * 4)


def test_layers_without_scales_have_none(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = {f"model.layers.1.self_attn.{part}_scale": torch.tensor([2.0, 3.0]) for part in "kv"}
    with caplog.at_level(logging.INFO, "octavo"):
        assert list(found_in(with_scales(llama, tmp_path, one))) == [1]
    assert "keys and values of 1 of 3 layers are scaled as the checkpoint says, one for each head" in caplog.text
    assert "there are no scales" not in caplog.text


def test_layers_keep_their_own_where_they_are_of_several_groups(tmp_path: Path) -> None:
    folder = checkpoints.make("gemma2", tmp_path / "gemma2")
    written = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(float(10 * layer + at))
        for layer in range(4)
        for at, part in enumerate("kv", start=1)
    }
    found = found_in(with_scales(folder, tmp_path / "scaled", written))
    assert {layer: numbers(scales) for layer, scales in found.items()} == {
        layer: ([10 * layer + 1] * 2, [10 * layer + 2] * 2) for layer in range(4)
    }


def test_names_of_the_bare_model(tmp_path: Path) -> None:
    """GPT-2's own checkpoint leaves its `transformer.` out of all names."""
    folder = checkpoints.make("gpt2", tmp_path / "gpt2")
    for prefix in ("", "transformer."):
        written = {f"{prefix}h.0.attn.{part}_scale": torch.tensor(2.0) for part in "kv"}
        assert list(found_in(with_scales(folder, tmp_path / f"scaled{prefix}", written))) == [0]


def test_a_sharded_checkpoint(llama: Path, tmp_path: Path) -> None:
    """A key's scale in the first file, its value's in the second; a file that the index does not name is none of it."""
    scales = {f"model.layers.{n}.self_attn.{part}_scale": torch.tensor(n + 2.0) for n in range(LAYERS) for part in "kv"}
    tensors = load_file(llama / "model.safetensors") | scales
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + name.endswith('v_scale')}-of-00002.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file, {"format": "pt"})
    save_file({"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, tmp_path / "original.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = found_in(tmp_path)
    assert [numbers(found[layer]) for layer in range(LAYERS)] == [([n + 2] * 2, [n + 2] * 2) for n in range(LAYERS)]


def test_a_name_on_the_hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are where the hub's client has put them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    with_scales(llama, repository / "snapshots" / commit, {"model.layers.2.self_attn.kv_scale": torch.tensor(2.0)})
    assert list(found_in("someone/tiny")) == [2]


def test_weights_without_a_checkpoint_have_no_scales(llama: Path, tmp_path: Path) -> None:
    """Whatever lies beside them."""
    folder = with_scales(llama, tmp_path, {})
    assert load_random(folder).files == ()
    assert load(gguf_files.write(llama, folder / "tiny.gguf"), progress=False).files == ()


BAD = {
    "0": torch.tensor(0.0),
    "-1": torch.tensor([-1.0]),
    "nan": torch.tensor([2.0, torch.nan]),
    "inf": torch.tensor([torch.inf]),
}


@pytest.mark.parametrize("shown", BAD)
@pytest.mark.parametrize("name", ["k_scale", "v_proj.v_scale", "kv_scale"])
def test_a_bad_scale_is_refused(shown: str, name: str, llama: Path, tmp_path: Path) -> None:
    name = f"model.layers.1.self_attn.{name}"
    folder = with_scales(llama, tmp_path, {name: BAD[shown]})
    with pytest.raises(UnsupportedModel) as refusal:
        found_in(folder)
    assert str(refusal.value).startswith(f"{name} in the checkpoint is {shown}: a scale of an fp8 cache is finite and")
    assert "KV_CACHE_DTYPE=auto, which needs no scales" in str(refusal.value)
    assert found_in(folder, torch.float32) == {}


def test_a_scale_for_each_of_other_heads_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = with_scales(llama, tmp_path, {"model.layers.0.self_attn.k_scale": torch.ones(HEADS)})
    with pytest.raises(UnsupportedModel, match=r"is of shape \(4,\): .* one number, or one for each of 2 key heads"):
        found_in(folder)


@pytest.mark.parametrize(
    ("kv_dtype", "told"), [(E4M3, 1), (torch.float8_e4m3fnuz, 1), (torch.float8_e5m2, 0), (torch.bfloat16, 0)]
)
def test_a_narrow_cache_without_scales_is_a_warning(
    kv_dtype: torch.dtype, told: int, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "octavo.models"):
        assert found_in(llama, kv_dtype) == {}
    assert len(caplog.records) == told
    limit = "240" if kv_dtype == torch.float8_e4m3fnuz else "448"
    text = f"keys and values beyond {limit} are cut to that; KV_CACHE_DTYPE=fp8_e5m2 holds up to 57344"
    assert caplog.text.count(text) == told
