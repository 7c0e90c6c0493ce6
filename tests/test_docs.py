"""The documentation says what is there: settings, hooks, commands, targets, and an example that runs."""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

import octavo.bench.ahead_command
import octavo.bench.cli
from octavo import hooks, settings_page
from octavo.attention.check import check_backend
from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.attention.installed import devices
from octavo.cli import app
from octavo.conformance.registry import trials
from octavo.engine.sampling_params import SamplingParams
from octavo.hooks import HOOKS
from octavo.new_backend import new_backend
from octavo.plugins import Plugins
from octavo.settings import Settings, variable
from octavo.settings.elsewhere import GONE
from tests import reference
from tests.distributions import plugins_of, spec
from tests.test_hooks import STEP

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITHIN = {
    name: typer.main.get_command(group).commands  # type: ignore[attr-defined]
    for name, group in (("bench", octavo.bench.cli.app), ("kernels", octavo.bench.ahead_command.app))
}
"""Commands of commands, which hand on all that they are given."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """The words behind each call of a program in a page's console blocks."""
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split("  #")[0].split()
            while words and "=" in words[0]:
                del words[0]
            if line.startswith("$ ") and Path(words[0]).name == program:
                yield words[1:]


def unknown(words: Sequence[str]) -> set[str]:
    """What is not a flag of the command that they call. Raises KeyError where there is no such command."""
    command, *rest = words
    within = command in WITHIN and not rest[0].startswith("-")
    known = WITHIN[command][rest[0]] if within else COMMANDS[command]
    options = {option for parameter in known.params for option in parameter.opts + parameter.secondary_opts}
    return {word.partition("=")[0] for word in rest if word.startswith("-")} - options - {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for words in commands(page, "octavo"):
        assert not unknown(words), words


def test_flags_of_every_command_are_looked_at() -> None:
    """Of those within others too, whose flags differ from one to the next."""
    assert not unknown(["bench", "serving", "--rate", "2", "--slo=ttft=2"])
    assert unknown(["bench", "waste", "--rate", "2"]) == {"--rate"}
    assert unknown(["kernels", "compile", "--batch", "1 x 16"]) == {"--batch"}
    assert unknown(["backends", "--from"]) == {"--from"}
    with pytest.raises(KeyError, match="speed"):
        unknown(["bench", "speed"])


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[0] for page in PAGES for words in commands(page, "make")}
    named |= {target for page in PAGES for target in re.findall(r"`make ([a-z]+)`", page.read_text(encoding="utf-8"))}
    assert {"demo", "test"} <= named <= targets


def rows(page: str, name: str) -> dict[str, str]:
    """Of a page's tables, the lines whose first cell is code that matches `name`: it, and the second cell."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(re.findall(rf"^\| `({name})` \| (.*?) ?\|", text, re.MULTILINE))


def test_the_page_of_settings_is_up_to_date() -> None:
    """If not: make settings."""
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings_page.markdown()


def test_the_page_of_settings_has_them_all() -> None:
    page = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert rows("settings.md", "[a-z_]+").keys() == Settings.model_fields.keys()
    assert "| `port` | `--port`<br>`PORT` | `3000` | a whole number from 0 to 65535 | Port to listen on; 0: " in page
    assert "| `compile` | `--compile`<br>`--no-compile`<br>`COMPILE` |  | true or false | Compile the model: " in page


def test_settings_in_files_are_settings(tmp_path: Path) -> None:
    shown = [block for page in PAGES for block in blocks(page, "toml") if "octavo.toml" in block]
    assert shown
    for text in shown:
        file = tmp_path / "octavo.toml"
        file.write_text(text)
        assert Settings(octavo_config=file).sources.keys() >= tomllib.loads(text).keys()


def test_what_tgi_had_and_is_gone_is_documented() -> None:
    said = rows("migrate-from-tgi.md", "[A-Z_]+")
    assert said.items() >= {variable(name): instead for name, instead in GONE.items()}.items()


def test_every_sampling_parameter_is_documented_with_its_default() -> None:
    defaults = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    assert rows("generate.md", "[a-z_]+") | {name: f"`{value}`" for name, value in defaults.items()} == rows(
        "generate.md", "[a-z_]+"
    )


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_in_step(name: str) -> None:
    """If not: make reference."""
    assert (DOCS / name).read_text(encoding="utf-8") == reference.page(name)


def test_every_hook_is_documented() -> None:
    """With what it is given."""
    page = (DOCS / "hooks.md").read_text(encoding="utf-8")
    kinds = {name for name, kind in vars(hooks).items() if getattr(kind, "__module__", "") == "octavo.hooks"}
    assert {*HOOKS, "StepStats"} <= kinds == set(re.findall(r"^### (\w+)$", page, re.MULTILINE))


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert set(navigation) == {str(page.relative_to(DOCS)) for page in PAGES[1:]}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What `octavo new-backend mychip` writes, on the path."""
    folder = new_backend("mychip", tmp_path_factory.mktemp("projects"), Plugins([]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "octavo_mychip"]:
        del sys.modules[name]


def is_of(block: str, folder: Path) -> bool:
    """Is it a part of a file there? Only how it is indented and broken into lines may differ."""
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.suffix in (".py", ".toml")]
    return any("".join(block.split()) in "".join(text.split()) for text in texts)


@pytest.fixture(scope="module")
def shown(project: Path) -> Iterator[dict[str, Any]]:
    """The names of the blocks of write-a-backend.md that are no part of the project, run one after another."""
    module = sys.modules["shown"] = ModuleType("shown")
    for block in blocks(DOCS / "write-a-backend.md", "python"):
        if not is_of(block, project):
            exec(compile(block, "write-a-backend.md", "exec"), module.__dict__)
    yield module.__dict__
    del sys.modules["shown"]


def plugin(**functions: Any) -> ModuleType:
    """A module of these functions."""
    module = ModuleType("plugin")
    vars(module).update(functions)
    return module


def conform(backend: type[AttentionBackend], case: str) -> None:
    check_backend(backend)
    outcomes = [trial.run() for trial in trials(backend, CPU(), only=case)]
    assert outcomes
    assert [outcome.reason for outcome in outcomes if outcome.result != "passed"] == []


def test_blocks_are_of_the_project(project: Path) -> None:
    page = DOCS / "write-a-backend.md"
    assert [is_of(block, project) for block in blocks(page, "toml")] == [True]
    assert sum(is_of(block, project) for block in blocks(page, "python")) == 6


def test_a_window_as_shown(shown: dict[str, Any]) -> None:
    assert shown["Windowed"].capabilities.features == {"window"}
    conform(shown["Windowed"], "features")


def test_several_chips_as_shown(shown: dict[str, Any]) -> None:
    class Chip(CPU):
        generation = 1

    backend = shown["SeveralChips"]
    tried = {trial.configuration.dtype for trial in trials(backend, Chip())}
    assert tried == set(backend.capabilities.dtypes) - {torch.bfloat16}
    Chip.generation = 2
    assert torch.bfloat16 in {trial.configuration.dtype for trial in trials(backend, Chip())}


def test_an_option_as_shown(shown: dict[str, Any]) -> None:
    backend = shown["Exacting"]
    conform(backend, "unknown-option")
    assert backend(spec(), 128, CPU(), {"exact": True}).exact
    with pytest.raises(ValueError, match="exact is 1, it must be true or false"):
        backend(spec(), 128, CPU(), {"exact": 1})


def test_a_device_as_shown(shown: dict[str, Any]) -> None:
    plugins = plugins_of(plugin(octavo_devices=shown["octavo_devices"]))
    assert shown["MyChip"] in [one.kind for one in devices(plugins)]
    assert plugins.faults == []
    assert "pip install torch-mychip" in shown["MyChip"].unavailable()


def test_a_trial_that_is_named_is_one(project: Path) -> None:
    backend = import_module("octavo_mychip.backend").MychipBackend
    (named,) = {word for words in commands(DOCS / "write-a-backend.md", "octavo") for word in words if "[fp32" in word}
    assert len(trials(backend, CPU(), only=named.strip("'"))) == 1


def test_an_observer_as_shown() -> None:
    (block,) = blocks(DOCS / "hooks.md", "python")[:1]
    names: dict[str, Any] = {}
    exec(compile(block, "hooks.md", "exec"), names)
    plugins = plugins_of(plugin(octavo_step_finished=names["octavo_step_finished"]))
    plugins.step_finished(STEP)
    assert plugins.faults == []
