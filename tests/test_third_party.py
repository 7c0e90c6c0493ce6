"""A backend in a distribution of its own, written and installed as a stranger would."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.attention.device import CPU
from octavo.attention.select import choose
from octavo.plugins import Plugins
from tests.attention.test_phases import packed
from tests.checkpoints import counting_model
from tests.distributions import spec

SOURCE = Path(__file__).parent / "third_party"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that pip has installed it into, on `sys.path`."""
    folder = tmp_path_factory.mktemp("third_party")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--no-compile", "--target", str(folder), str(SOURCE)], check=True)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "octavo_thirdparty"]:
        del sys.modules[name]


def octavo(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program, in a process of its own, that finds `folder` as it finds site-packages."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", "from octavo.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
    )


def test_it_is_under_150_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")) < 150


def test_it_is_found_chosen_and_made(installed: Path) -> None:
    selection = choose([spec()], CPU(), attention="rowwise", plugins=Plugins())
    assert selection.name == "example/rowwise"
    (candidate,) = [one for one in selection.candidates if one.name == "example/rowwise"]
    assert (candidate.distribution, candidate.version, candidate.reasons) == ("octavo-thirdparty", "3.1.4", ())
    assert selection.build(spec(), CPU()).spec == spec()


def test_it_is_left_alone_until_it_is_asked_for(installed: Path) -> None:
    assert choose([spec()], CPU(), plugins=Plugins()).name == "cpu/flashdecoding"


def test_it_is_listed(installed: Path) -> None:
    done = octavo(installed, "backends", "--json", ATTENTION="Example/Rowwise")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["chosen"] == "example/rowwise"
    rows = {row["name"]: row for row in report["backends"]}
    row = rows["example/rowwise"]
    assert (row["distribution"], row["version"], row["reasons"]) == ("octavo-thirdparty", "3.1.4", [])
    assert rows["any/reference"]["distribution"] == "octavo"


def test_it_passes_the_conformance_suite(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = octavo(installed, "conformance", "example/rowwise", "--device", "cpu", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["passed"]


def test_a_model_answers_with_it(installed: Path, tmp_path: Path) -> None:
    """The counting model's answer is known, and comes from the cache alone."""
    model = str(counting_model(tmp_path))
    done = octavo(installed, "generate", model, "41 42 43", "--max-tokens", "40", "--json", ATTENTION="rowwise")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["answers"][0]["text"].split() == [str(number) for number in range(44, 84)]
    assert report["backend"].startswith("attention example/rowwise on cpu, blocks of 16 tokens")


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_it_agrees_with_the_reference_over_its_cache(installed: Path, changes: dict[str, object]) -> None:
    group, batch = spec(**changes), packed([(1, 6), (1, 0), (3, 0), (2, 7)], block_size=16)
    sinks = torch.randn(2, 4) if group.sinks else None
    plugins = Plugins()
    ours = choose([group], CPU(), attention="rowwise", plugins=plugins).build(group, CPU(), None, sinks)
    options = {"layout": "block slot head dim"}
    reference = choose([group], CPU(), attention="reference", block_size=16, plugins=plugins)
    theirs = reference.build(group, CPU(), options, sinks)
    cache = ours.layout.allocate(9, torch.device("cpu"))
    everywhere = torch.arange(9 * 16)
    for layer in range(2):
        ours.layout.write(cache, layer, torch.randn(9 * 16, 2, 8), torch.randn(9 * 16, 2, 8), everywhere)
    query, (key, value) = torch.randn(len(batch.slots), 4, 8), torch.randn(2, len(batch.slots), 2, 8)
    ours.layout.write(cache, 1, key, value, batch.slots)
    outputs = [one.attend(query, key, value, cache, one.plan(batch), 1) for one in (ours, theirs)]
    torch.testing.assert_close(*outputs)
