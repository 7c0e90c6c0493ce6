"""Plugins at fault, installed: named with distribution and version wherever one looks, while octavo serves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.attention.device import CPU
from octavo.attention.select import choose
from octavo.plugins import Plugins
from tests.checkpoints import counting_model
from tests.distributions import BACKEND, installed_in, spec, write_distribution
from tests.server.test_run import octavo_serve

TWICE = BACKEND.replace('"good"', '"twice"')
OBSERVER = "\n@hookimpl\ndef octavo_step_finished(step):\n    raise OSError('full disk')\n"


@dataclass(frozen=True)
class Case:
    """A plugin, what is wrong with it, and where."""

    version: str
    source: str
    where: str
    error: str
    at_start: bool = True
    """False: it shows with the first step."""


# Distributions by their names.
CASES = {
    "octavo-absent": Case("0.1", "import octavo_nowhere", "import", "NotFoundError: No module named 'octavo_nowhere'"),
    "octavo-raising": Case(
        "0.2",
        BACKEND.replace("return [Backend]", "raise RuntimeError('no driver')"),
        "octavo_attention_backends",
        "RuntimeError: no driver",
    ),
    "octavo-watching": Case(
        "0.3",
        BACKEND.replace('"good"', '"watching"') + OBSERVER,
        "octavo_step_finished",
        "OSError: full disk",
        at_start=False,
    ),
    "octavo-newer": Case(
        "0.4",
        BACKEND.replace("contract = 1", "contract = 99"),
        "octavo_attention_backends",
        "octavo_newer.Backend is written for contract 99, this octavo speaks contract 1",
    ),
    "octavo-first": Case("0.5", TWICE, "octavo_attention_backends", "test/twice is registered twice, by octavo_first."),
    "octavo-second": Case("0.6", TWICE, "octavo_attention_backends", "and octavo_second.Backend of octavo-second 0.6"),
    "octavo-misspelt": Case(
        "0.7",
        BACKEND.replace("octavo_attention_backends", "octavo_atention_backends"),
        "octavo_atention_backends",
        "octavo has no such hook, did you mean octavo_attention_backends?",
    ),
}  # fmt: skip
AT_START = [name for name, case in CASES.items() if case.at_start]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All of them in a folder on the path, as pip leaves them."""
    folder = tmp_path_factory.mktemp("site")
    for name, case in CASES.items():
        write_distribution(folder, name, case.version, case.source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for module in (name.replace("-", "_") for name in CASES):
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def listed(site: Path) -> Any:
    """What `octavo backends` says."""
    script = f"import sys; sys.path[:0] = {sys.path}; from octavo.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "backends", "--json"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def log(site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a server says that has answered two requests."""
    with octavo_serve(counting_model(tmp_path_factory.mktemp("counting"))) as (process, http):
        for _ in range(2):
            asked = {"inputs": "41 42 43", "parameters": {"max_new_tokens": 3}}
            assert http.post("/generate", json=asked).json() == {"generated_text": " 44 45 46"}
        process.terminate()
        assert process.stderr is not None
        return [json.loads(line)["message"] for line in process.stderr]


@pytest.fixture(scope="module")
def plugins(site: Path) -> Plugins:
    return installed_in(site)


@pytest.mark.parametrize("name", AT_START)
def test_the_list_of_backends_names_it(name: str, listed: Any) -> None:
    (fault,) = [one for one in listed["faults"] if one["distribution"] == name]
    assert (fault["version"], fault["where"]) == (CASES[name].version, CASES[name].where)
    assert CASES[name].error in fault["error"]
    assert listed["chosen"] == "cpu/flashdecoding"


@pytest.mark.parametrize("name", CASES)
def test_the_log_names_it_once_while_the_server_answers(name: str, log: list[str]) -> None:
    case = CASES[name]
    (line,) = [line for line in log if line.startswith(f"a plugin is at fault: {name} ")]
    origin = f"{name} {case.version} (entry point {name.replace('-', '_')})"
    assert line.startswith(f"a plugin is at fault: {origin}, {case.where}: ")
    assert case.error in line


@pytest.mark.parametrize("name", AT_START)
def test_the_error_names_it_if_it_was_asked_for(name: str, plugins: Plugins) -> None:
    case = CASES[name]
    wanted = "twice" if case.source is TWICE else name.removeprefix("octavo-")
    with pytest.raises(ValueError, match=f"attention {wanted}(: there is no backend| cannot be used)") as caught:
        choose([spec()], CPU(), attention=wanted, plugins=plugins)
    lines = str(caught.value).split("plugins at fault:\n")[1].splitlines()
    (line,) = [line for line in lines if line.startswith(f"  {name} {case.version} (entry point ")]
    assert f"{case.where}: " in line
    assert case.error in line
    if case.source is not TWICE:
        assert case.error in f"{type(caught.value.__cause__).__name__}: {caught.value.__cause__}"
    else:
        assert str(caught.value).splitlines()[0].count("registered twice") == 1
