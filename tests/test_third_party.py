"""Backends in distributions of their own, built and installed beside octavo's wheel as a stranger would."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.checkpoints import counting_model, make
from tests.engine.harness import Reference

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "plugins/example"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NO_INDEX = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]


def done(command: Sequence[str | Path], folder: Path | None = None, **variables: str) -> str:
    """What a command prints, which has to succeed; of octavo it finds what is installed, and no setting."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ATTENTION")}
    ran = subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment: wheels of octavo and of the example, and by a path the libraries that this one has.

    An editable install of octavo among these is not found: paths within a path are not followed.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, wheels: Path) -> "Environment":
        done([*PIP, "wheel", *NO_INDEX, "--wheel-dir", wheels, ROOT, EXAMPLE])
        venv.create(folder, symlinks=True)
        new = cls(folder)
        new.pip_installs(*sorted(wheels.glob("*.whl")))
        (new.site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        return new

    @property
    def site_packages(self) -> Path:
        base = str(self.folder)
        return Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))

    def pip_installs(self, *what: str | Path) -> None:
        done([*PIP, "--python", self.folder, "install", *NO_INDEX, *what])

    def python(self, *arguments: str, folder: Path | None = None) -> str:
        return done([self.folder / "bin/python", *arguments], folder)

    def octavo(self, *arguments: str, folder: Path | None = None, **variables: str) -> str:
        return done([self.folder / "bin/octavo", *arguments], folder, **variables)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.make(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def project(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `octavo new-backend mychip` writes, installed as its README says."""
    folder = tmp_path_factory.mktemp("projects")
    said = environment.octavo("new-backend", "mychip", folder=folder)
    assert f"{folder}/octavo-mychip is written" in said
    environment.pip_installs("--editable", folder / "octavo-mychip")
    return folder / "octavo-mychip"


def generated(environment: Environment, model: Path, prompt: str, attention: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        environment.octavo(
            "generate", str(model), prompt, "--max-tokens", "40", "--no-chat", "--json", ATTENTION=attention
        )
    )
    assert report["backend"] == f"attention cpu/{attention} on cpu, blocks of 128 tokens"
    return report


def test_the_wheels_are_what_runs(environment: Environment) -> None:
    found = environment.python("-c", "import octavo, octavo_example; print(octavo.__file__, octavo_example.__file__)")
    assert all(Path(file).is_relative_to(environment.site_packages) for file in found.split())


def test_they_are_listed_and_left_alone_until_they_are_asked_for(environment: Environment, project: Path) -> None:
    report = json.loads(environment.octavo("backends", "--json"))
    assert report["faults"] == []
    rows = {row["name"]: row for row in report["backends"]}
    for name in ("example", "mychip"):
        row = rows[f"cpu/{name}"]
        assert (row["distribution"], row["version"], row["reasons"]) == (f"octavo-{name}", "0.1.0", [])
    assert report["chosen"] == "cpu/flashdecoding"
    assert rows[report["chosen"]]["distribution"] == "octavo"


@pytest.mark.parametrize("name", ["example", "mychip"])
def test_they_pass_the_conformance_suite(name: str, environment: Environment, project: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment.octavo("conformance", name, "--device", "cpu", "--json", str(report))
    told = json.loads(report.read_text())
    assert (told["conformance"], told["passed"]) == (f"cpu/{name}", True)


def test_the_tests_of_a_new_backend_pass(environment: Environment, project: Path) -> None:
    assert " passed in " in environment.python("-m", "pytest", "-p", "no:cacheprovider", folder=project)
    assert not [path for path in project.rglob("*.py") if "example" in path.read_text().casefold() + path.name]


def test_a_model_answers_with_a_new_backend(environment: Environment, project: Path, tmp_path: Path) -> None:
    """The counting model's answer is known, and comes from the cache alone: from two blocks, then from three."""
    numbers = [str(number) for number in range(290)]
    report = generated(environment, counting_model(tmp_path), " ".join(numbers[:240]), "mychip")
    assert report["answers"][0]["text"].split() == numbers[240:280]


def test_a_random_model_answers_with_the_example_as_with_transformers(environment: Environment, tmp_path: Path) -> None:
    model, prompt = (
        make("llama", tmp_path),
        "An octavo is a book of sheets that are folded into eight leaves each. " * 3,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    truth = Reference.load(model, [tokenizer.encode(prompt)], 40).answers[0]
    assert generated(environment, model, prompt, "example")["answers"][0]["text"] == tokenizer.decode(truth)
