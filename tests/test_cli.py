"""The command line: quick to start, one message and exit status 2 on bad input, answers on stdout."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import octavo
from octavo import cli
from octavo.attention.contract import AttentionBackend
from octavo.hooks import hookimpl
from octavo.outputs import Completion, RequestOutput
from octavo.plugins import Plugins
from tests.checkpoints import counting_model, make
from tests.distributions import Offers, backend, plugins_of


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    """`octavo backends` silences a logger for its process."""
    yield
    logging.getLogger("octavo.plugins").setLevel(logging.NOTSET)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin, env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """Three backends, and a plugin that raises, in place of what is installed."""

    class Broken:
        @hookimpl
        def octavo_attention_backends(self) -> list[type[AttentionBackend]]:
            raise RuntimeError("no driver")

    high = backend("high", priority=3, unfit="there is no card")
    plugins = plugins_of(Offers([backend("low"), high, backend("paged", can={"prefix_caching": True})]), Broken())
    monkeypatch.setattr("octavo.plugins.plugins", lambda: plugins)
    return plugins


def test_help_is_quick_and_names_the_commands() -> None:
    """Quick: neither torch nor transformers is imported."""
    script = """
import sys
from octavo.cli import main
try:
    main()
except SystemExit as status:
    assert not status.code
for heavy in ("torch", "transformers", "numpy"):
    assert heavy not in sys.modules, heavy
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, "--help"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for command in ("backends", "bench", "conformance", "demo-model", "generate"):
        assert command in done.stdout


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"octavo {octavo.__version__}\n")


def test_no_arguments_show_the_help() -> None:
    assert "Serve language models" in run().output


def test_backends_as_json(offered: Plugins) -> None:
    result = run("backends", "--json", "--device", "cpu")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["device"], report["chosen"], report["problem"]) == ("cpu", "test/low", None)
    rows = {row["name"]: row for row in report["backends"]}
    assert rows.keys() == {"test/low", "test/high", "test/paged"}
    assert rows["test/high"]["reasons"] == ["there is no card"]
    assert rows["test/paged"]["block_sizes"] == [16, 32]
    assert rows["test/paged"]["head_sizes"] == ["any"]
    assert rows["test/paged"]["features"] == ["prefix caching"]
    (fault,) = report["faults"]
    assert (fault["where"], fault["error"]) == ("octavo_attention_backends", "RuntimeError: no driver")


def test_backends_as_a_table(offered: Plugins) -> None:
    result = run("backends", "--attention", "prefill=low,decode=paged", "--device", "cpu")
    assert result.exit_code == 0
    for text in ("test/high", "there is no card", "can run", "Plugins at fault", "RuntimeError: no driver"):
        assert text in result.stdout
    assert "chosen: attention prefill=test/low,decode=test/paged on cpu, blocks of 16 tokens" in result.stdout


def test_backends_shows_the_table_whatever_is_asked_for(offered: Plugins) -> None:
    result = run("backends", "--attention", "pagd", "--device", "cpu")
    assert result.exit_code == 2
    assert "test/paged" in result.stdout
    assert 'octavo: attention pagd: there is no backend "pagd", did you mean paged?' in result.stderr


def test_attention_may_be_a_variable(offered: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION", "paged")
    assert json.loads(run("backends", "--json", "--device", "cpu").stdout)["chosen"] == "test/paged"
    flags = ("--attention", "low", "--device", "cpu")
    assert json.loads(run("backends", "--json", *flags).stdout)["chosen"] == "test/low"


def test_settings_with_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are secret."""
    file = tmp_path / "octavo.toml"
    file.write_text('port = 1\nmax_best_of = 1\nmax_stop_sequences = 1\napi_key = "secret"')
    monkeypatch.setenv("MAX_BEST_OF", "2")
    monkeypatch.setenv("MAX_STOP_SEQUENCES", "2")
    result = run("settings", "--config", str(file), "--max-stop-sequences", "3")
    rows = {words[0]: words[1:] for line in result.stdout.splitlines() if (words := line.split())}
    assert rows["port"][:2] == ["1", "in"]
    assert rows["max_best_of"] == ["2", "variable", "MAX_BEST_OF"]
    assert rows["max_stop_sequences"] == ["3", "flag", "--max-stop-sequences"]
    assert rows["max_top_n_tokens"] == ["5", "default"]
    assert rows["api_key"][:3] == ["1,", "not", "shown"]
    assert str(file) in "".join(result.output.split())
    assert "secret" not in result.output
    assert run("settings", "--port", "x").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backends", "--device", "tpu"], 'device "tpu" is not known'),
        (["backends", "--block-size", "0"], "block_size is 0 (flag --block-size): it must be a whole number at"),
        (["generate", "/nowhere", "hello"], "/nowhere"),
        (["generate", "TINY", "hello", "--dtype", "float8"], "dtype is 'float8' (flag --dtype)"),
        (["generate", "TINY", "hello", "--temperature", "-1"], "temperature"),
        (["generate", "TINY", "hello", "--attention", "referense"], "did you mean reference"),
        (["generate", "TINY", "hello", "--block-size", "16", "--max-batch-total-tokens", "8"], "the cache must hold"),
        (["generate", "TINY", "hello", "--max-batch-total-tokens", "64", "--max-tokens", "999"], "prompt 0"),
        (["generate", "COUNTING", "1 2", "--chat"], "no chat template"),
        (["generate", "TINY"], "Missing argument"),
        (["conformance", "nobody"], 'there is no backend "nobody"'),
        (["conformance", "reference", "--device", "tpu"], 'device "tpu" is not known'),
        (["nonsense"], "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_message(arguments: list[str], message: str, tiny: Path, counting: Path) -> None:
    named = {"TINY": str(tiny), "COUNTING": str(counting)}
    result = run(*(named.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_model(tmp_path_factory.mktemp("counting"))


def test_generate_as_json(counting: Path) -> None:
    """The counting model's answer is known."""
    result = run("generate", str(counting), "7 8 9", "100 101", "--max-tokens", "5", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [answer["text"].split() for answer in report["answers"]] == [
        ["10", "11", "12", "13", "14"],
        ["102", "103", "104", "105", "106"],
    ]
    assert [answer["prompt"] for answer in report["answers"]] == ["7 8 9", "100 101"]
    assert [answer["finish_reason"] for answer in report["answers"]] == ["length", "length"]
    assert (report["generated_tokens"], report["prompt_tokens"], report["cached_tokens"]) == (10, 5, 0)
    assert report["backend"].startswith("attention cpu/flashdecoding on cpu, blocks of ")


def test_generate_as_text(counting: Path) -> None:
    result = run(
        "generate", str(counting), "7 8 9", "--max-tokens", "3", "--attention", "reference", "--block-size", "2"
    )
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[lines.index("7 8 9") + 1] == "10 11 12"
    assert "tokens/s (3 in " in lines[-1]
    assert "3 prompt tokens, 0 of them cached; attention any/reference on cpu, blocks of 2 tokens" in lines[-1]


def test_prompts_come_from_stdin_too(counting: Path) -> None:
    result = run("generate", str(counting), "1 2", "-", "--max-tokens", "1", "--json", stdin="20 21\n\n30 31\n")
    answers = json.loads(result.stdout)["answers"]
    assert [(answer["prompt"], answer["text"].strip()) for answer in answers] == [
        ("1 2", "3"),
        ("20 21", "22"),
        ("30 31", "32"),
    ]


@pytest.mark.parametrize(
    ("flags", "prompt"), [([], "user: hi\nassistant:"), (["--chat"], "user: hi\nassistant:"), (["--no-chat"], "hi")]
)
def test_a_chat_template_is_used_where_there_is_one(flags: list[str], prompt: str, tiny: Path) -> None:
    """The tiny model's tokenizer has a token for each byte."""
    report = json.loads(run("generate", str(tiny), "hi", "--max-tokens", "1", "--json", *flags).stdout)
    assert report["answers"][0]["prompt_tokens"] == len(prompt)


def test_a_failed_request_is_told() -> None:
    failed = RequestOutput("hi", [1], [Completion(0, finish_reason="error", error="the device is gone")])
    answers = cli.Answers(["hi"], [failed], 1.0, "attention test/paged")
    assert answers.to_dict()["answers"][0]["error"] == "the device is gone"
