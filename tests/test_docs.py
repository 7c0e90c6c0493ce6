"""The documentation says what is there: settings, hooks, commands, targets, and an example that runs."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

from octavo import settings_page
from octavo.attention.check import check_backend
from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU
from octavo.cli import app
from octavo.conformance.registry import trials
from octavo.engine.sampling_params import SamplingParams
from octavo.hooks import HOOKS
from octavo.settings import Settings, variable
from octavo.settings.elsewhere import GONE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """The words behind each call of a program in a page's console blocks."""
    for block in blocks(page, "console"):
        for line in block.splitlines():
            words = line.removeprefix("$ ").split("  #")[0].split()
            while words and "=" in words[0]:
                del words[0]
            if line.startswith("$ ") and words[0] == program:
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for words in commands(page, "octavo"):
        assert words[0] in COMMANDS
        options = {
            option for parameter in COMMANDS[words[0]].params for option in parameter.opts + parameter.secondary_opts
        }
        flags = {word for word in words if word.startswith("--")}
        assert words[0] == "bench" or flags <= options


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


def test_every_hook_is_documented() -> None:
    assert rows("write-a-backend.md", r"octavo_\w+").keys() == set(HOOKS)


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert set(navigation) == {str(page.relative_to(DOCS)) for page in PAGES[1:]}


@pytest.fixture(scope="module")
def example() -> Iterator[type[AttentionBackend]]:
    """The backend that write-a-backend.md shows, made from the page's text."""
    module = sys.modules["shown_backend"] = ModuleType("shown_backend")
    source = blocks(DOCS / "write-a-backend.md", "python")[0]
    exec(compile(source, "write-a-backend.md", "exec"), module.__dict__)
    backend: type[AttentionBackend] = module.MyChipBackend
    yield backend
    del sys.modules["shown_backend"]


@pytest.mark.parametrize("case", ["mixed", "prefill-in-chunks", "padding", "block-sizes", "dtypes"])
def test_the_example_conforms(example: type[AttentionBackend], case: str) -> None:
    check_backend(example)
    outcomes = [trial.run() for trial in trials(example, CPU(), only=case)]
    assert outcomes
    assert [outcome.reason for outcome in outcomes if outcome.result != "passed"] == []
