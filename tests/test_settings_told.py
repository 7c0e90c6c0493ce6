"""What people are told of settings: wrong values wherever they come from, TGI's that are gone, groups in the help."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.settings import GROUPS, Settings, flag, variable
from octavo.settings.elsewhere import GONE, gone_flag

pytestmark = pytest.mark.usefixtures("bare_environment")

INTEGER, POSITIVE = "it must be a whole number at least 0", "it must be a whole number at least 1"
NUMBER, BOOLEAN = "it must be a number at least 0", "it must be true or false"
DTYPE = "it must be auto, float32, float16 or bfloat16"
WRONG = {
    "trust_remote_code": ("perhaps", BOOLEAN),
    "dtype": ("fp8", DTYPE),
    "load_format": ("gguf", "it must be auto or dummy"),
    "cuda_memory_fraction": ("0", "it must be a number above 0 and at most 1"),
    "compile": ("2", BOOLEAN),
    "attention_options": ("{", "it must be a JSON object, e.g."),
    "prefix_caching": ("perhaps", BOOLEAN),
    "kv_cache_dtype": (
        "fp8",
        "it must be auto, float32, float16, bfloat16, fp8_e4m3fn, fp8_e5m2 or fp8_e4m3fnuz",
    ),
    "block_size": ("-1", POSITIVE),
    "max_batch_total_tokens": ("lots", POSITIVE),
    "tgi_wiggle_room": ("1.1", "it must be a number above 0 and at most 1"),
    "max_batch_prefill_tokens": ("0", POSITIVE),
    "max_batch_size": ("0.5", POSITIVE),
    "deterministic": ("perhaps", BOOLEAN),
    "cuda_graphs": ("all", "it must be auto, or whole numbers with commas between them, e.g. 1,2,4,8, or 0"),
    "waiting_served_ratio": ("-0.1", NUMBER),
    "max_waiting_tokens": ("-1", INTEGER),
    "max_input_tokens": ("0", POSITIVE),
    "max_total_tokens": ("1e3", POSITIVE),
    "max_concurrent_requests": ("0", POSITIVE),
    "max_client_batch_size": ("0", POSITIVE),
    "max_best_of": ("0", POSITIVE),
    "max_stop_sequences": ("-1", INTEGER),
    "max_top_n_tokens": ("-1", INTEGER),
    "payload_limit": ("2MB", POSITIVE),
    "request_timeout": ("0", "it must be a number above 0"),
    "max_queue_seconds": ("0", "it must be a number above 0"),
    "port": ("65536", "it must be a whole number from 0 to 65535"),
    "validation_workers": ("0", POSITIVE),
    "api_key": ("a key", "an API key is made of printable ASCII characters without spaces"),
    "graceful_termination_timeout": ("inf", NUMBER),
    "engine_restarts": ("-1", INTEGER),
    "engine_restart_seconds": ("nan", NUMBER),
    "ui": ("yes, please", BOOLEAN),
    "json_output": ("yes, please", BOOLEAN),
    "otlp_endpoint": ("localhost:4317", "it must begin with http:// or https://, as in http://localhost:4318"),
}
"""For each setting that can be wrong by itself, a value that is, and what is to be said of it."""
FREE = {
    "model_id", "revision", "device", "attention", "host", "cors_allow_origin", "otlp_service_name", "octavo_config",
    "octavo_cache",
}  # fmt: skip
"""Any text, as far as can be told before it is used."""


def test_every_setting_can_be_wrong() -> None:
    assert WRONG.keys() | FREE == Settings.model_fields.keys()


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_wherever_it_comes_from(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, before it loads anything: the setting, the value, where it came from, what is allowed."""
    value, must = WRONG[name]
    flags = []
    if source == "variable":
        monkeypatch.setenv(variable(name), value)
        where = f"variable {variable(name)}"
    elif source == "file":
        file = tmp_path / "octavo.toml"
        file.write_text(f'{name} = "{value}"\n')
        flags, where = ["--config", str(file)], f"in {file}"
    elif must == BOOLEAN:
        return  # such a flag has no value
    else:
        flags, where = [flag(name), value], f"flag {flag(name)}"
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 2
    shown = "not shown" if name == "api_key" else repr(value)
    assert result.stderr.startswith(f"octavo: {name} is {shown} ({where}): {must}")


@pytest.mark.parametrize("name", GONE)
def test_what_tgi_had_and_is_gone_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert name not in Settings.model_fields
    assert (
        gone_flag(flag(name)) == gone_flag(f"{flag(name)}=1") == f"{flag(name)} is not a flag of octavo: {GONE[name]}"
    )
    monkeypatch.setenv(variable(name), "1")
    Settings()
    warned = name not in ("env", "huggingface_hub_cache", "master_addr", "master_port")
    assert (f"the variable {variable(name)} has no effect: {GONE[name]}" in caplog.text) == warned


@pytest.mark.parametrize("words", [["--num-shard", "2"], ["demo", "--num-shard=2", "--port", "80"]])
def test_a_flag_of_tgis_is_told_before_all_else(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert (result.exit_code, result.stderr) == (2, f"octavo: {gone_flag('--num-shard')}\n")


def test_the_model_is_a_word_or_a_flag() -> None:
    result = CliRunner().invoke(app, ["serve", "demo", "--model-id", "other"])
    assert result.exit_code == 2
    assert "the model is demo and --model-id other: give one of them" in result.stderr


def test_help_shows_the_groups_with_ranges() -> None:
    wide = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"})
    text = wide.invoke(app, ["serve", "--help"]).stdout
    places = [text.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    for (group, names), start, end in zip(GROUPS.items(), places, [*places[1:], len(text)], strict=True):
        for name in names:
            assert f"{flag(name)} " in text[start:end].replace(",", " "), (group, name)
    assert "[PORT: from 0 to 65535; default 3000]" in text
    assert "─ Attention and cache ─" in wide.invoke(app, ["generate", "--help"]).stdout
