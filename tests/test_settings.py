"""Every setting once, from an argument or its variable; wrong values say where they came from and what is allowed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo.settings import GROUPS, Settings, SettingsError, flag, variable
from octavo.settings.elsewhere import without_effect

FROM_TGI = {
    "model_id", "revision", "trust_remote_code", "dtype", "kv_cache_dtype",
    "max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens", "max_batch_total_tokens", "max_batch_size",
    "waiting_served_ratio", "max_waiting_tokens", "cuda_graphs", "cuda_memory_fraction", "otlp_endpoint",
    "otlp_service_name",
}  # fmt: skip
"""Of TGI's launcher; ATTENTION, PREFIX_CACHING, BLOCK_SIZE and TGI_WIGGLE_ROOM are variables of its server."""


pytestmark = pytest.mark.usefixtures("bare_environment")


def test_names_are_tgis() -> None:
    assert {*FROM_TGI, "attention", "prefix_caching", "block_size", "tgi_wiggle_room"} <= Settings.model_fields.keys()
    assert variable("max_total_tokens") == "MAX_TOTAL_TOKENS"
    assert flag("max_total_tokens") == "--max-total-tokens"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_each_setting_says_what_it_means(name: str) -> None:
    description = Settings.model_fields[name].description or ""
    assert description.endswith(".")
    assert len(description) > 20


def test_each_setting_is_in_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(Settings.model_fields)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPILE", raising=False)
    settings = Settings()
    unset = {name for name in Settings.model_fields if getattr(settings, name) is None}
    assert unset == {
        "model_id", "revision", "attention", "compile", "block_size", "prefix_caching", "max_input_tokens",
        "max_total_tokens", "max_batch_prefill_tokens", "max_batch_total_tokens", "max_batch_size", "request_timeout",
        "max_queue_seconds", "cuda_graphs", "octavo_config", "otlp_endpoint", "otlp_service_name",
    }  # fmt: skip
    assert (settings.tgi_wiggle_room, settings.dtype, settings.device) == (0.9, "auto", "auto")
    assert (settings.load_format, settings.cuda_memory_fraction) == ("auto", 1.0)
    assert settings.octavo_cache == Path.home() / ".cache" / "octavo"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ATTENTION", "cuda/paged", "cuda/paged"),
        ("ATTENTION", "", None),
        ("attention", "paged", "paged"),
        ("BLOCK_SIZE", "16", 16),
        ("PREFIX_CACHING", "1", True),
        ("PREFIX_CACHING", "true", True),
        ("PREFIX_CACHING", "0", False),
        ("PREFIX_CACHING", "False", False),
        ("ATTENTION_OPTIONS", '{"splits": 4}', {"splits": 4}),
        ("TGI_WIGGLE_ROOM", "0.5", 0.5),
        ("LOAD_FORMAT", "dummy", "dummy"),
        ("DETERMINISTIC", "1", True),
        ("CUDA_MEMORY_FRACTION", "0.5", 0.5),
        ("OCTAVO_CACHE", "/big/disk", Path("/big/disk")),
        ("OCTAVO_CACHE", "~/models", Path.home() / "models"),
    ],
)
def test_variables(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(Settings(), name.lower()) == value


def test_an_argument_wins_and_none_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCK_SIZE", "16")
    assert Settings(block_size=64).block_size == 64
    assert Settings(block_size=None).block_size == 16


def test_the_cache_folder_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert Settings().octavo_cache == Path("/elsewhere/octavo")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().block_size = 3


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"DTYPE": "fp8"}, {}, "dtype is 'fp8' (variable DTYPE): it must be auto, float32, float16 or bfloat16"),
        ({}, {"dtype": "fp8"}, "dtype is 'fp8' (argument): it must be auto"),
        ({"BLOCK_SIZE": "big"}, {}, "block_size is 'big' (variable BLOCK_SIZE): it must be a whole number at least 1"),
        ({}, {"block_size": 0}, "block_size is 0 (argument): it must be a whole number at least 1"),
        ({}, {"max_batch_size": 0}, "max_batch_size is 0 (argument): it must be a whole number at least 1"),
        ({"TGI_WIGGLE_ROOM": "1.5"}, {}, "it must be a number above 0 and at most 1"),
        ({}, {"cuda_memory_fraction": 0}, "is 0 (argument): it must be a number above 0 and at most 1"),
        (
            {"PREFIX_CACHING": "maybe"},
            {},
            "prefix_caching is 'maybe' (variable PREFIX_CACHING): it must be true or false",
        ),
        ({"ATTENTION_OPTIONS": "{splits"}, {}, "(variable ATTENTION_OPTIONS): it must be a JSON object"),
        ({"ATTENTION_OPTIONS": "[1]"}, {}, "it must be a JSON object"),
        ({}, {"atention": "paged"}, "there is no setting atention, did you mean attention?"),
        (
            {"MAX_TOTAL_TOKENS": "100"},
            {"max_input_tokens": 100},
            "max_input_tokens is 100 (argument), it must be below max_total_tokens, which is 100 (variable MAX_TOT",
        ),
        (
            {},
            {"max_total_tokens": 101, "max_batch_total_tokens": 100},
            "max_total_tokens is 101 (argument), it must be at most max_batch_total_tokens, which is 100 (argument)",
        ),
        ({}, {"max_input_tokens": 100, "max_batch_total_tokens": 100}, "must be below max_batch_total_tokens"),
        ({}, {"max_batch_prefill_tokens": 9, "max_batch_total_tokens": 8}, "no step can compute more than the cache"),
        ({}, {"block_size": 64, "max_batch_total_tokens": 63}, "the cache must hold a block"),
        (
            {"MAX_BATCH_SIZE": "65"},
            {"max_batch_prefill_tokens": 64, "deterministic": True},
            "max_batch_size is 65 (variable MAX_BATCH_SIZE), it must be at most max_batch_prefill_tokens, which is 64",
        ),
        (
            {"MAX_WAITING_TOKENS": "5"},
            {},
            "(variable MAX_WAITING_TOKENS) and has no effect, since waiting_served_ratio",
        ),
        ({"MAX_WAITING_TOKENS": "5", "WAITING_SERVED_RATIO": "0"}, {}, "and has no effect"),
        ({"MAX_INPUT_LENGTH": "5", "MAX_INPUT_TOKENS": "5"}, {}, "set one of them"),
        (
            {"MAX_INPUT_LENGTH": "5"},
            {"max_input_tokens": 5},
            "(variable MAX_INPUT_LENGTH) is the former name of max_inp",
        ),
        ({"MAX_INPUT_LENGTH": "long"}, {}, "max_input_tokens is 'long' (variable MAX_INPUT_LENGTH, by its former name"),
        (
            {"MAX_INPUT_LENGTH": "9"},
            {"max_total_tokens": 9},
            "max_input_tokens is 9 (variable MAX_INPUT_LENGTH, by its former name max_input_length), it must be below",
        ),
    ],
)
def test_wrong_settings(
    variables: dict[str, str], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_at_their_limits() -> None:
    Settings(max_input_tokens=99, max_total_tokens=100, max_batch_total_tokens=100, max_batch_prefill_tokens=100)
    Settings(max_batch_total_tokens=100)  # below the default of max_batch_prefill_tokens, which nobody asked for
    Settings(waiting_served_ratio=0.3, max_waiting_tokens=5)
    Settings(block_size=64, max_batch_total_tokens=64)
    Settings(max_batch_size=64, max_batch_prefill_tokens=64, deterministic=True)
    Settings(max_batch_size=65, max_batch_prefill_tokens=64)


def test_the_former_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(max_input_length=5).max_input_tokens == 5
    monkeypatch.setenv("MAX_INPUT_LENGTH", "7")
    assert Settings().max_input_tokens == 7
    assert Settings(max_input_length=5).max_input_tokens == 5


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("ATTENTION_BACKEND", "ATTENTION"),
        ("VLLM_ATTENTION_BACKEND", "ATTENTION"),
        ("OCTAVO_ATTENTION", "ATTENTION"),
        ("TGI_BLOCK_SIZE", "BLOCK_SIZE"),
        ("PREFIX_CACHE", "PREFIX_CACHING"),
        ("MAX_TOTAL_TOKEN", "MAX_TOTAL_TOKENS"),
        ("MAX_BATCH_PREFIL_TOKENS", "MAX_BATCH_PREFILL_TOKENS"),
        ("WIGGLE_ROOM", "TGI_WIGGLE_ROOM"),
        ("LOAD_FORMATS", "LOAD_FORMAT"),
    ],
)
def test_near_misses_are_told(
    name: str, right: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        Settings()
    assert f"the variable {name} has no effect, did you mean {right}?" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "ATTENTION",
        "MAX_INPUT_LENGTH",
        "block_size",
        "PATH",
        "HOME",
        "HF_HOME",
        "MODEL_DIR",
        "DEVICES",
        "MAX_TOKENS",
        "GIT_REVISION",
        "CUDA_VISIBLE_DEVICES",
        "XDG_CACHE_HOME",
        "OMP_NUM_THREADS",
        "HF_HUB_CACHE",
        "LOG_FORMAT",
        "TGI",
    ],
)
def test_others_are_left_alone(name: str) -> None:
    assert list(without_effect({name: "1"}, Settings.model_fields)) == []


def test_a_file_gives_way_to_variables_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text('port = 1\nmax_best_of = 2\nmax_stop_sequences = 3\napi_key = ["a", "b"]\nmax_input_length = 9\n')
    monkeypatch.setenv("MAX_BEST_OF", "20")
    monkeypatch.setenv("MAX_STOP_SEQUENCES", "30")
    settings = Settings(octavo_config=file, max_stop_sequences=300)
    assert (settings.port, settings.max_best_of, settings.max_stop_sequences) == (1, 20, 300)
    assert (settings.api_key, settings.max_input_tokens) == (("a", "b"), 9)
    monkeypatch.setenv("OCTAVO_CONFIG", str(file))
    assert Settings().port == 1


@pytest.mark.parametrize("in_file", [True, False])
def test_another_process_has_them_as_they_are(in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a former name too, and whatever the file says by then."""
    file = tmp_path / "octavo.toml"
    file.write_text("block_size = 16\n" + "max_input_length = 9\n" * in_file)
    monkeypatch.setenv("OCTAVO_CONFIG", str(file))
    if not in_file:
        monkeypatch.setenv("MAX_INPUT_LENGTH", "9")
    settings = Settings()
    given = json.loads(json.dumps(settings.model_dump(mode="json", exclude_unset=True)))
    file.write_text("max_batch_size = 1\nmax_input_length = 10\nno setting")
    there = Settings(_sources=dict(settings.sources), _read=False, **given)
    assert there.model_dump() == settings.model_dump()
    assert there.sources == settings.sources
    assert there.max_input_tokens == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "cannot be read as a TOML file"),
        ('port = "x"', "port is 'x' (in "),
        ("prot = 1", "there is no setting prot, did you mean port?"),
        ("max_input_tokens = 9\nmax_total_tokens = 9", "max_input_tokens is 9 (in "),
    ],
)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        Settings(octavo_config=file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_keys_are_listed_and_stay_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "first, second")
    assert Settings().api_key == ("first", "second")
    with pytest.raises(SettingsError) as caught:
        Settings(api_key="a key")
    assert "a key" not in str(caught.value).replace("a key,", "")
    assert "api_key is not shown (argument)" in str(caught.value)
