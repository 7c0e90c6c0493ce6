"""Requests that count, each from its own start, through a cache too small for them: no one gets another's tokens.

Whatever is lost, mixed up or read from a wrong place stops the counting (see `tests.checkpoints.counting_model`).
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from octavo.engine.engine import Engine
from octavo.engine.runner import Flight, Runner
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.step import Step
from tests.checkpoints import counting_model
from tests.engine.harness import Mode, answer, build

VOCABULARY = 512
REQUESTS = 64
OPEN = 12
"""How many are in the engine at a time, so that a second turn comes before the first was evicted."""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_model(tmp_path_factory.mktemp("counting"), VOCABULARY)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each step copied."""
    counts: list[int] = []
    launch = Runner.launch

    def counting(self: Runner, step: Step) -> Flight:
        counts.append(len(step.copies))
        return launch(self, step)

    monkeypatch.setattr(Runner, "launch", counting)
    return counts


def counted(start: int, tokens: int) -> list[int]:
    return [(start + index) % VOCABULARY for index in range(tokens)]


@pytest.mark.parametrize(
    ("block_size", "chunk", "attention"),
    [(1, None, "reference"), (16, 32, None), (64, 64, "reference")],
)
def test_everyone_counts_on(
    counter: Path, copied: list[int], block_size: int, chunk: int | None, attention: str | None
) -> None:
    """In two turns: the second goes on from the first one's answer, in the middle of a block that is cached."""
    mode = Mode(
        block_size=block_size, chunk=chunk, prefix_caching=True, arrival="", cache_tokens=960, attention=attention
    )
    engine = build(counter, mode).engine
    chance = random.Random(block_size)
    counts = [Count(8 * number, chance.randint(1, 30), chance.randint(50, 110)) for number in range(REQUESTS)]
    waiting, running = list(counts), dict[int, Count]()
    while waiting or running:
        while waiting and len(running) < OPEN:
            count = waiting.pop(0)
            running[count.submit(engine)] = count
        for output in engine.step():
            count = running[output.request_id]
            assert output.token_id == count.next, f"after {len(count.found)} tokens from {count.start} on"
            count.found.append(output.token_id)
            count.cached = output.cached_tokens
            if output.finish_reason is not None:
                del running[output.request_id]
                if not count.turn:
                    waiting.insert(0, count.go_on(chance.randint(1, 3), chance.randint(20, 40)))
                    counts.append(waiting[0])
    stats = engine.scheduler.kv.stats()
    assert all(len(count.found) == count.new for count in counts)
    assert len(counts) == 2 * REQUESTS
    assert engine.scheduler.preemptions > 0
    assert stats.evictions > 0
    assert sum(copied) > 0 or block_size == 1
    assert any(count.cached for count in counts if count.turn)
    assert stats.free + stats.cached == stats.total


@dataclass
class Count:
    """One request: from where it counts, how far it says itself, and how much is asked of it."""

    start: int
    length: int
    new: int
    turn: int = 0
    found: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def next(self) -> int:
        return (self.start + self.length + len(self.found)) % VOCABULARY

    def submit(self, engine: Engine) -> int:
        params = SamplingParams(max_tokens=self.new, temperature=0)
        return engine.submit(counted(self.start, self.length), params, seed=0)

    def go_on(self, said: int, new: int) -> "Count":
        return Count(self.start, self.length + self.new + said, new, self.turn + 1)


def test_a_block_that_is_not_copied_stops_the_counting(counter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests rely on: the model sees such faults. Here the second request goes on in a block of NaN."""
    mode = Mode(block_size=16, chunk=None, prefix_caching=True, arrival="at once", cache_tokens=1536)
    engine = build(counter, mode).engine
    prompt = counted(40, 20)
    assert answer(engine, [prompt], 4).tokens == [counted(60, 4)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_copy", lambda self, copies: None)
        second = answer(engine, [[*prompt, 60]], 4)
    assert second.cached == [20]
    assert second.tokens != [counted(61, 4)]
