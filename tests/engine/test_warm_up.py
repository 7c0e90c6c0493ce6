"""The step that is measured at the start, what is measured of it, and the cache that this leaves room for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU, Device, Memory
from octavo.engine import warm_up
from octavo.engine.build import Built, build_engine
from octavo.engine.runner import Runner
from octavo.engine.step import Step
from octavo.engine.warm_up import Worst, step
from octavo.logs import JsonLines
from octavo.models.load import LoadedModel, load
from octavo.plugins import plugins
from octavo.settings import Settings, SettingsError
from octavo_reference.backend import ReferenceBackend
from tests.checkpoints import make
from tests.distributions import Offers, plugins_of

BLOCK_SIZE = 16


class Card(CPU):
    """A device whose memory is known: so much is free, and a step takes so much."""

    name = "card"
    free = 1_000_000
    taken = 300_000

    def __init__(self) -> None:
        self.measured = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        return Memory(self.free, 2_000_000)

    def peak(self, run: Callable[[], None]) -> int:
        run()
        self.measured += 1
        return self.taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load(folder, dtype=torch.float32, progress=False)


def build(loaded: LoadedModel, device: Device, **settings: Any) -> Built:
    chosen = {"attention": "reference", "block_size": BLOCK_SIZE, "max_batch_size": 4} | settings
    return build_engine(loaded, device, Settings(**chosen), plugins())


def block_bytes(loaded: LoadedModel) -> int:
    """Keys and values of a block, float32, in all layers."""
    config: Any = loaded.config
    return int(BLOCK_SIZE * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4)


def test_the_cache_is_what_a_step_leaves(loaded: LoadedModel) -> None:
    card = Card()
    memory = build(loaded, card, tgi_wiggle_room=0.5).memory
    assert memory.num_blocks == (1_000_000 - 300_000) // 2 // block_bytes(loaded)
    assert (memory.activations, memory.block_bytes, card.measured) == (300_000, block_bytes(loaded), 1)
    assert memory.cache == memory.num_blocks * block_bytes(loaded)


def test_a_size_is_honoured_or_refused_with_the_most(loaded: LoadedModel) -> None:
    most = (700_000 // block_bytes(loaded) - 1) * BLOCK_SIZE
    built = build(loaded, Card(), max_batch_total_tokens=most)
    assert built.engine.scheduler.kv.pool.num_blocks == 700_000 // block_bytes(loaded)
    with pytest.raises(SettingsError) as told:
        build(load(Path(loaded.name), dtype=torch.float32, progress=False), Card(), max_batch_total_tokens=most + 1)
    for words in (f"max_batch_total_tokens is {most + 1} (argument)", "1000000 are free", f"give at most {most}"):
        assert words in str(told.value)
    assert "300000 of them" in str(told.value)


def test_a_step_that_does_not_fit(loaded: LoadedModel) -> None:
    class Small(Card):
        def peak(self, run: Callable[[], None]) -> int:
            raise torch.OutOfMemoryError("no")

    with pytest.raises(SettingsError, match="a step of 64 prompt tokens and 4 requests that decode does not fit"):
        build(loaded, Small(), max_batch_prefill_tokens=64)


def test_a_step_that_leaves_nothing_is_named(loaded: LoadedModel) -> None:
    class Full(Card):
        taken = Card.free

    with pytest.raises(SettingsError, match="takes up to 1000000 of 1000000 free bytes: lower max_batch_prefill_tok"):
        build(loaded, Full())


def test_a_backend_that_cannot_compute_is_not_told_at_the_start(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Card):
        def peak(self, run: Callable[[], None]) -> int:
            raise RuntimeError("the kernel is not there")

    assert build(loaded, Broken()).memory.activations == 0
    assert "the one to measure failed: the kernel is not there" in caplog.text


def test_what_is_measured_on_a_cpu_is_no_less_than_its_tensors(tmp_path: Path) -> None:
    """At least the logits of all rows, and the hidden states of all prompt tokens in one layer."""
    vocabulary, hidden, rows, tokens = 30_000, 64, 32, 4096
    folder = make("llama", tmp_path, vocab_size=vocabulary, max_position_embeddings=tokens)
    model = load(folder, dtype=torch.float32, progress=False)
    sizes = {"max_batch_total_tokens": 2 * tokens, "max_batch_size": rows, "max_batch_prefill_tokens": tokens}
    taken = build(model, CPU(), **sizes).memory.activations
    assert taken >= rows * vocabulary * 4 + tokens * hidden * 4
    assert taken < 2**30


def test_workspaces_are_counted_and_shared_ones_once(folder: Path) -> None:
    shared = torch.zeros(3000, dtype=torch.uint8)

    class Keeping(ReferenceBackend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.own = torch.zeros(7, dtype=torch.int32)

        def workspaces(self) -> Sequence[Tensor]:
            return shared[:1000], shared[1000:], self.own

    class Other(Keeping):
        name = "other"

    model = make("gemma2", folder.with_name("gemma2"))  # two groups of layers
    found = plugins_of(Offers([Keeping, Other]))
    for attention, own in (("reference", 2), ("prefill=reference,decode=other", 4)):
        loaded = load(model, dtype=torch.float32, progress=False)
        memory = build_engine(loaded, Card(), Settings(attention=attention, block_size=16), found).memory
        assert memory.workspaces == 3000 + own * 7 * 4, attention


def test_the_table(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        memory = build(loaded, Card(), max_batch_total_tokens=160).memory
    record = next(record for record in caplog.records if "memory" in getattr(record, "fields", {}))
    lines = [line.split() for line in record.getMessage().splitlines()[1:]]
    assert [line[0] for line in lines] == ["weights", "workspaces", "activations", "graphs", "cache"]
    assert " ".join(lines[4][3:]).startswith("10 blocks of 16 tokens")
    assert lines[4][-2:] == ["160", "tokens"]
    assert '"activations": 300000' in JsonLines().format(record)
    assert memory.weights >= sum(parameter.nbytes for parameter in loaded.model.parameters())


def test_the_step_that_is_measured() -> None:
    wanted = step(Worst(prompt_tokens=21, context=10, rows=3, whole_prompts=False), block_size=4)
    assert np.diff(wanted.query_starts).tolist() == [1, 1, 1, 1, 10, 10]
    assert wanted.decodes == 4
    assert wanted.context_lengths.tolist() == [4, 4, 4, 10, 10, 10]
    assert wanted.positions.tolist() == [3, 3, 3, 9, *range(10), *range(10)]
    assert wanted.slots.tolist() == [4 + position % 4 for position in wanted.positions]
    assert wanted.block_table.shape == (6, 3)
    assert set(wanted.block_table.flatten()) == {1}
    assert wanted.logits_of.tolist() == [0, 1, 2, 3, 13, 23]
    assert len(wanted.sampling) == 6


def test_a_backend_without_older_context_computes_prompts_whole() -> None:
    wanted = step(Worst(prompt_tokens=12, context=10, rows=0, whole_prompts=True), block_size=4)
    assert wanted.context_lengths.tolist() == np.diff(wanted.query_starts).tolist() == [10, 2]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_cpu_runs_few_layers_of_a_long_step(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each kind; the whole model only for what fills a block and for the rows that are sampled."""
    from octavo_reference.backend import ReferenceBackend

    calls: list[tuple[int, AttentionBackend]] = []
    attend = ReferenceBackend.attend

    def counted(self: ReferenceBackend, query: Any, *rest: Any) -> Any:
        calls.append((len(query), self))
        return attend(self, query, *rest)

    monkeypatch.setattr(ReferenceBackend, "attend", counted)
    model = load(make(architecture, tmp_path), dtype=torch.float32, progress=False)
    built = build(model, CPU(), max_batch_total_tokens=8192, max_batch_prefill_tokens=4096)
    kinds = len(built.engine.runner.groups)
    layers: int = model.config.num_hidden_layers
    for tokens, runs in ((4096 // 16, 2), (4096 // 8, 1)):
        of_size = [backend for count, backend in calls if count == tokens]
        assert runs * kinds <= len(of_size) <= runs * (layers - 1)
        assert len(set(map(id, of_size))) == kinds
    assert not any(count > 4096 // 8 for count, _ in calls)


@pytest.mark.parametrize(("tokens", "context"), [(4096, 131_072), (100, 65_536), (4096, 5000)])
def test_long_contexts_are_worked_out(tokens: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that holds all scores takes tokens * context; no step with a long one is run to learn that."""

    def scores(wanted: Step, *_: object) -> int:
        tokens, longest = len(wanted.token_ids), int(wanted.context_lengths.max())
        assert longest <= 8192
        return 1000 + 7 * tokens + 3 * longest + 4 * tokens * longest

    monkeypatch.setattr(warm_up, "_peak", lambda runner, wanted, device: scores(wanted))
    monkeypatch.setattr(warm_up, "_run", lambda runner, wanted: scores(wanted))
    found = warm_up._of_prompts(cast(Runner, None), Worst(tokens, context, 0, False), BLOCK_SIZE, Card())
    exact = 1000 + 7 * tokens + 3 * context + 4 * tokens * context
    assert exact <= found <= 1.1 * exact
