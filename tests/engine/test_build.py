"""An engine is opened: where its weights come from, and how much of a device it may take."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest

from octavo import LLM, SamplingParams
from octavo.attention.device import CPU, Memory
from octavo.engine import build
from octavo.models.load import load
from octavo.models.source import ModelNotFound
from octavo.settings import SettingsError
from octavo_reference.backend import ReferenceBackend
from tests import checkpoints
from tests.distributions import Offers, plugins_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


class Card(CPU):
    """A device of a million bytes, of which an eighth is somebody else's."""

    name = "card"
    events: ClassVar[list[object]] = []
    share = 1.0

    def memory(self) -> Memory:
        return Memory(min(875_000, int(1_000_000 * self.share)), 1_000_000)

    def peak(self, run: Any) -> int:
        run()
        return 100_000

    def limit(self, fraction: float) -> bool:
        self.events.append(fraction)
        self.share = fraction
        return True


def opened(folder: Path, device: type[CPU] = Card, **settings: Any) -> LLM:
    return LLM(
        folder, device=device.name, plugins=plugins_of(Offers([ReferenceBackend], [Card])), block_size=16,
        max_batch_size=2, max_total_tokens=32, progress=False, **settings,
    )  # fmt: skip


def drawn(model: Path) -> list[int]:
    llm = LLM(model, load_format="dummy", device="cpu", block_size=16, max_batch_total_tokens=1024, progress=False)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), progress=False)
    return list(output.completions[0].token_ids)


def test_random_weights_need_a_configuration_alone(folder: Path, tmp_path: Path) -> None:
    """They are the same every time, whatever lies beside it; no token ends an answer."""
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    answer = drawn(tmp_path)
    assert len(answer) == 8
    assert drawn(tmp_path / "config.json") == drawn(folder) == answer


def test_random_weights_for_a_name_on_the_hub() -> None:
    with pytest.raises(ModelNotFound, match=r"no configuration at .*owner/model, and random weights"):
        LLM("owner/model", load_format="dummy", device="cpu", progress=False)


def test_a_share_of_the_memory_bounds_all_from_before_the_model_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is what a step leaves of the share, or of what is free, whichever is less."""
    Card.events.clear()

    def loading(*arguments: Any, **more: Any) -> Any:
        Card.events.append("load")
        return load(*arguments, **more)

    monkeypatch.setattr(build, "load", loading)
    blocks = {}
    for share, free in ((0.5, 500_000), (0.25, 250_000), (1.0, 875_000)):
        llm = opened(folder, cuda_memory_fraction=share, tgi_wiggle_room=1.0)
        block_bytes = sum(group.backend.layout.block_bytes for group in llm.engine.runner.groups)
        blocks[share] = llm.engine.scheduler.kv.pool.num_blocks
        assert blocks[share] == (free - 100_000) // block_bytes
    assert Card.events == [0.5, "load", 0.25, "load", 1.0, "load"]
    with pytest.raises(SettingsError, match=r"free on card \(cuda_memory_fraction is 0.25\) .* give at most \d+"):
        opened(folder, cuda_memory_fraction=0.25, max_batch_total_tokens=blocks[0.5] * 16)
    with pytest.raises(SettingsError, match=r"or free memory \(cuda_memory_fraction is 0.1\)"):
        opened(folder, cuda_memory_fraction=0.1)


def test_a_share_of_what_cannot_be_limited_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo"):
        opened(folder, CPU, max_batch_total_tokens=512)
        assert "cuda_memory_fraction" not in caplog.text
        opened(folder, CPU, max_batch_total_tokens=512, cuda_memory_fraction=0.5)
    assert "cuda_memory_fraction is 0.5 and has no effect: cpu has no such limit" in caplog.text
