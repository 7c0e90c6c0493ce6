"""Backends in distributions of their own, built and installed beside octavo's wheel as a stranger would."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.checkpoints import counting_model, make
from tests.engine.harness import Reference
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "plugins/example"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NO_INDEX = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]


def done(
    command: Sequence[str | Path], variables: Mapping[str, str] = MappingProxyType({}), folder: Path | None = None
) -> str:
    """What a command prints, which has to succeed; of octavo it finds what is installed, and no setting."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ATTENTION")}
    ran = subprocess.run(command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True)
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
        done([*PIP, "--python", folder, "install", *NO_INDEX, *sorted(wheels.glob("*.whl"))])
        new.program("pip").write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
        new.program("pip").chmod(0o755)
        (new.site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
        return new

    @property
    def site_packages(self) -> Path:
        base = str(self.folder)
        return Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def octavo(self, *arguments: str, **variables: str) -> str:
        return done([self.program("octavo"), *arguments], variables)

    def shell(self, script: str, folder: Path) -> str:
        """What a user types. `pip` takes what it needs from the libraries that are there."""
        path = f"{self.program('pip').parent}:{os.environ['PATH']}"
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        return done(["bash", "-euc", script], {"PATH": path, **offline}, folder)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.make(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("wheels"))


@dataclass(frozen=True)
class Project:
    """A backend by `octavo new-backend`, and what the commands said that made, installed and tested it."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def mychip(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """As docs/write-a-backend.md begins, to the letter."""
    folder = tmp_path_factory.mktemp("projects")
    typed = blocks(ROOT / "docs/write-a-backend.md", "console")[0].replace("$ ", "")
    return Project(folder / "octavo-mychip", environment.shell(typed, folder))


def generated(environment: Environment, model: Path, prompt: str, attention: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        environment.octavo(
            "generate", str(model), prompt, "--max-tokens", "40", "--no-chat", "--json", ATTENTION=attention
        )
    )
    assert report["backend"] == f"attention cpu/{attention} on cpu, blocks of 128 tokens"
    return report


def test_the_wheels_are_what_runs(environment: Environment) -> None:
    script = "import octavo, octavo_example; print(octavo.__file__, octavo_example.__file__)"
    found = done([environment.program("python"), "-c", script])
    assert all(Path(file).is_relative_to(environment.site_packages) for file in found.split())


def test_they_are_listed_and_left_alone_until_they_are_asked_for(environment: Environment, mychip: Project) -> None:
    report = json.loads(environment.octavo("backends", "--json"))
    assert report["faults"] == []
    rows = {row["name"]: row for row in report["backends"]}
    for name in ("example", "mychip"):
        row = rows[f"cpu/{name}"]
        assert (row["distribution"], row["version"], row["reasons"]) == (f"octavo-{name}", "0.1.0", [])
    assert report["chosen"] == "cpu/flashdecoding"
    assert rows[report["chosen"]]["distribution"] == "octavo"


def test_the_example_passes_the_conformance_suite(environment: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment.octavo("conformance", "example", "--device", "cpu", "--json", str(report))
    told = json.loads(report.read_text())
    assert (told["conformance"], told["passed"]) == ("cpu/example", True)


def test_a_new_backend_passes_its_tests_and_the_conformance_suite(mychip: Project) -> None:
    lines = iter(mychip.said.splitlines())
    for expected in (
        r"/octavo-mychip is written",
        r"\d+ passed in ",
        r"cpu/mychip on cpu",
        r"all of \d+ trials of .* passed",
    ):
        assert any(re.search(expected, line) for line in lines), f"{expected} in {mychip.said}"
    assert not [path for path in mychip.folder.rglob("*.py") if "example" in path.read_text().casefold() + path.name]


def test_a_model_answers_with_a_new_backend(environment: Environment, mychip: Project, tmp_path: Path) -> None:
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
