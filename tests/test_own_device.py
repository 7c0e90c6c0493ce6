"""A distribution that brings a device of its own: chosen, measured, filled and generated on. Core has no word of it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import octavo.llm
import octavo.plugins
from octavo import LLM, SamplingParams
from octavo.attention.device import Device
from octavo.attention.installed import devices
from octavo.attention.select import choose, choose_device
from octavo.attention.wish import BackendUnavailable
from octavo.cli import app
from octavo.plugins import Plugins
from tests import checkpoints
from tests.distributions import installed_in, spec, write_distribution
from tests.engine.harness import generate, load_reference

SMALL: dict[str, Any] = {"max_batch_prefill_tokens": 24, "max_batch_size": 4}
"""Its backend is slow."""
MEMORY = 6 << 20
"""Bytes that the device has free once it is told so, of twice as many."""

PLUGIN = f"""
from dataclasses import replace

import torch

from octavo import hookimpl
from octavo.attention.device import Device, Memory
from tests.conformance.vectorised import Vectorised


class Abacus(Device):
    '''Beads on the host: PyTorch calls it a CPU, and nobody else may.'''

    name = "abacus"
    priority = 50
    captures = True
    captured = 0
    replayed = 0

    @classmethod
    def unavailable(cls):
        return None

    @property
    def torch_device(self):
        return torch.device("cpu")

    def memory(self):
        return Memory({MEMORY}, {2 * MEMORY})

    def capture(self, run, pool=None):
        run()
        Abacus.captured += 1

        def replay():
            Abacus.replayed += 1
            run()

        return replay


class Counting(Vectorised):
    '''For contexts of 24 blocks at most.'''

    name = "counting"
    platform = "abacus"
    contract = 1
    priority = 5
    capabilities = replace(Vectorised.capabilities, head_sizes=(8, 16))

    @classmethod
    def probe(cls, device):
        return None if device.name == "abacus" else f"it runs on abacus, not on {{device.name}}"


@hookimpl
def octavo_devices():
    return [Abacus]


@hookimpl
def octavo_attention_backends():
    return [Counting]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("abacus")
    write_distribution(folder, "octavo-abacus", "0.3", PLUGIN)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("octavo_abacus", None)


@pytest.fixture(scope="module")
def plugins(folder: Path) -> Plugins:
    return installed_in(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("gemma2", tmp_path_factory.mktemp("gemma2"))


def own(plugins: Plugins) -> type[Device]:
    return next(one.kind for one in devices(plugins) if one.kind.name == "abacus")


def test_it_is_chosen_by_its_priority_and_by_its_name(plugins: Plugins) -> None:
    assert plugins.faults == []
    for name in ("auto", "Abacus"):
        assert type(choose_device(name, plugins)) is own(plugins)
    assert choose_device("cpu", plugins).name == "cpu"
    (registered,) = [one for one in devices(plugins) if one.kind.name == "abacus"]
    assert str(registered.origin) == "octavo-abacus 0.3"


def test_backends_are_asked_about_it(plugins: Plugins) -> None:
    device = choose_device("abacus", plugins)
    assert choose([spec()], device, plugins=plugins).name == "abacus/counting"
    with pytest.raises(BackendUnavailable, match="it runs on abacus, not on cpu"):
        choose([spec()], choose_device("cpu", plugins), attention="counting", plugins=plugins)


def load(model: Path, plugins: Plugins, **settings: Any) -> LLM:
    return LLM(
        model, device="abacus", dtype="float32", compile=False, plugins=plugins, progress=False, **SMALL, **settings
    )


def test_its_memory_is_what_the_cache_may_take(model: Path, plugins: Plugins) -> None:
    """All of it, as of any device but the host, whose memory serves others too."""
    llm = load(model, plugins)
    groups, pool = llm.engine.runner.groups, llm.engine.scheduler.kv.pool
    block_bytes = sum(group.backend.layout.block_bytes for group in groups)
    taken = sum(tensor.nbytes for group in groups for tensor in (*group.cache.keys, *group.cache.values))
    assert taken == pool.num_blocks * block_bytes
    wanted = int(MEMORY * llm.settings.tgi_wiggle_room)
    assert wanted - block_bytes < taken <= wanted
    assert "on abacus" in llm.selection.summary()


def test_more_than_it_has_is_refused(model: Path, plugins: Plugins) -> None:
    with pytest.raises(ValueError, match=rf"{MEMORY} are free on abacus"):
        load(model, plugins, max_batch_total_tokens=10**6)


def test_a_model_answers_on_it(model: Path, plugins: Plugins) -> None:
    """As transformers does, chunked and from cached prefixes."""
    prompts = [torch.randint(0, 250, (length,)).tolist() for length in (60, 3, 33)]
    prompts.append([*prompts[0][:40], 7, 8, 9])
    reference = load_reference(model)
    expected = [generate(reference, prompt, 12) for prompt in prompts]
    llm = load(model, plugins)
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, greedy, progress=False)
        assert [list(output.completions[0].token_ids) for output in outputs] == expected
    assert outputs[0].cached_tokens > 32


def test_its_captures_are_replayed(model: Path, plugins: Plugins) -> None:
    device: Any = own(plugins)
    llm = load(model, plugins)
    captured, replayed = device.captured, device.replayed
    assert captured > 0
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), progress=False)
    assert (device.captured, device.replayed - replayed) == (captured, 4)


def test_the_command_line_knows_it(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the distribution as it finds any that is installed."""
    for name, value in {"device": "abacus", "compile": 0, **SMALL}.items():
        monkeypatch.setenv(name.upper(), str(value))
    monkeypatch.setattr(octavo.plugins, "plugins", Plugins)

    def said(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    listed = said("backends")
    assert (listed["device"], listed["chosen"]) == ("abacus", "abacus/counting")
    monkeypatch.setattr(octavo.llm, "installed_plugins", Plugins)
    answered = said("generate", str(model), "one two", "--max-tokens", "3", "--no-chat")
    assert answered["backend"].startswith("attention abacus/counting on abacus")
    assert answered["generated_tokens"] == 3
