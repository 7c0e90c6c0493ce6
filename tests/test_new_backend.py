"""`octavo new-backend`: the example under another name, or one message; tests/test_third_party.py runs it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import app

EXAMPLE = Path(__file__).parents[1] / "plugins/example"
FILES = {
    str(path.relative_to(EXAMPLE)): path.read_text(encoding="utf-8")
    for path in EXAMPLE.rglob("*.*")
    if path.suffix in (".py", ".toml", ".md") and ".pytest_cache" not in path.parts
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new_backend(name: str) -> Result:
    return CliRunner().invoke(app, ["new-backend", name], env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.mark.parametrize(("name", "camel"), [("mychip", "Mychip"), ("my_chip2", "MyChip2"), ("class", "Class")])
def test_it_is_the_example_under_another_name(name: str, camel: str, here: Path) -> None:
    result = new_backend(name)
    assert result.exit_code == 0, result.output
    assert f"octavo conformance {name} " in result.output
    folder = here / f"octavo-{name}"
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*") if path.is_file()}
    back = {
        path.replace(name, "example"): text.replace(f"{camel}Backend", "ExampleBackend")
        for path, text in written.items()
    }
    assert back.keys() == FILES.keys() == {*FILES, "octavo_example/backend.py", "pyproject.toml", "README.md"}
    assert f"class {camel}Backend(" in written[f"octavo_{name}/backend.py"]
    if name == "mychip":  # no other word holds it
        assert {path: text.replace(name, "example").replace(camel, "Example") for path, text in back.items()} == FILES


def test_the_example_is_short() -> None:
    lines = [text.count("\n") for path, text in FILES.items() if path.startswith("octavo_example/")]
    assert 0 < sum(lines) < 150


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Chip", 'NAME is "My-Chip": a package and a class are called by it, so it must be small letters'),
        ("My-Chip", "a letter first: my_chip, for instance"),
        ("9", "a letter first\n"),
        ("a__b", "a_b, for instance"),
        ("ä", "a letter first\n"),
        ("../x", "x, for instance"),
        ("", 'NAME is "": '),
        ("x" * 300, "File name too long"),
        ("paged", 'NAME "paged" is taken by octavo '),
        ("cpu", 'NAME "cpu" is taken by the package octavo_cpu; take another one than auto, '),
        ("auto", 'NAME "auto" is taken: ATTENTION=auto takes the best there is; take another one'),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, message: str, here: Path) -> None:
    result = new_backend(name)
    assert result.exit_code == 2
    assert message in result.output
    assert list(here.iterdir()) == []


def test_what_is_there_is_left_alone(here: Path) -> None:
    (here / "octavo-mychip").mkdir()
    result = new_backend("mychip")
    assert result.exit_code == 2
    assert "octavo-mychip is there already: move it away, or take another name than mychip" in result.output
    assert list((here / "octavo-mychip").iterdir()) == []
