"""Greedy tokens are those of transformers' own `generate`, however requests are scheduled and blocks are shared."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.models import compile
from tests import checkpoints
from tests.conftest import Note
from tests.engine.harness import Mode, Reference, answer, build, pairs_left_out

TOKENS = 20

# Three sets of four modes: each set has every block size, all together have every pair of values. The number is the
# tokens that the cache holds: room for the longest request, and for more requests than can all grow.
_ROWS = """
1   None yes  once    8192  default    compiled
16  32   yes  random  176   reference  plain
64  5    no   once    8192  default    plain
256 None no   random  768   reference  compiled

1   32   no   random  150   reference  plain
16  5    yes  once    128   default    compiled
64  None yes  random  8192  reference  compiled
256 32   no   once    8192  default    plain

1   5    yes  once    150   reference  compiled
16  None no   random  8192  reference  plain
64  32   no   once    192   default    compiled
256 5    yes  random  8192  default    plain
"""


def mode(row: str) -> Mode:
    size, chunk, prefix, arrival, cache, attention, how = row.split()
    return Mode(
        block_size=int(size),
        chunk=None if chunk == "None" else int(chunk),
        prefix_caching=prefix == "yes",
        arrival="random" if arrival == "random" else "at once",
        cache_tokens=int(cache),
        attention=None if attention == "default" else attention,
        compile=how == "compiled",
    )


SETS = [[mode(row) for row in rows.splitlines()] for rows in _ROWS.strip().split("\n\n")]


def test_the_modes_cover_every_pair_of_values() -> None:
    assert pairs_left_out([mode for modes in SETS for mode in modes]) == []
    for modes in SETS:
        assert {mode.block_size for mode in modes} == {1, 16, 64, 256}
        assert {mode.tight for mode in modes} == {mode.prefix_caching for mode in modes} == {False, True}


def tiny_prompts() -> list[list[int]]:
    """Lengths around block borders and windows; some begin alike, one ends within another's block, one comes twice."""
    chance = random.Random(7)
    prompts = [chance.choices(range(250), k=length) for length in (63, 50, 58, 60, 1, 2, 16, 120, 250, 247)]
    prompts.append(prompts[0][:40] + chance.choices(range(250), k=15))
    prompts += [prompts[7][:100] + chance.choices(range(250), k=20), prompts[7][:70], prompts[8][:245], prompts[7]]
    return prompts


PROMPTS = tiny_prompts()
COMPILED = ("llama", "gemma3_text", "gpt2")
"""The pieces of others run as they were recorded: to compile them all would take minutes."""
UNCOMPILED = ("gpt_oss", "qwen3_moe")
"""Mixtures of experts, which cannot be recorded."""
CASES = [(architecture, number % 3) for number, architecture in enumerate(checkpoints.ARCHITECTURES)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Reference]:
    folder = checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))
    return folder, Reference.load(folder, PROMPTS, TOKENS)


@pytest.mark.parametrize(
    ("tiny", "modes"),
    [(name, SETS[index]) for name, index in CASES],
    indirect=["tiny"],
    ids=[name for name, _ in CASES],
)
def test_tiny_checkpoints(
    tiny: tuple[Path, Reference],
    modes: list[Mode],
    note: Note,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, reference = tiny
    architecture = folder.name.removesuffix("0")
    if architecture not in COMPILED:
        monkeypatch.setattr(compile, "_inductor", lambda piece, *_: compile._as_recorded(piece))
    for mode in modes:
        run(folder, replace(mode, compile=mode.compile and architecture not in UNCOMPILED), reference)
    report(reference, len(modes), note)


def run(folder: Path, mode: Mode, reference: Reference) -> None:
    """Prompts in one mode, and once more with everything cached where that is possible."""
    numbers = [number for number, prompt in enumerate(reference.prompts) if not mode.tight or fits(prompt, mode)]
    prompts, tokens = [reference.prompts[number] for number in numbers], len(reference.answers[0])
    engine = build(folder, mode).engine
    first = answer(engine, prompts, tokens, arrival=mode.arrival)
    reference.compare(numbers, first.tokens, mode.name)
    assert (engine.scheduler.preemptions > 0) == mode.tight, f"{mode.name}: {engine.scheduler.preemptions} preemptions"
    if not mode.prefix_caching:
        assert not any(first.cached), mode.name
    elif not mode.tight:
        again = answer(engine, prompts, tokens, arrival=mode.arrival, seed=1)
        reference.compare(numbers, again.tokens, f"{mode.name}, cached")
        assert again.cached == [len(prompt) - 1 for prompt in prompts], mode.name


def fits(prompt: list[int], mode: Mode) -> bool:
    """Prompts for a tight cache: those that grow into another block, of any size."""
    return 256 - TOKENS < len(prompt) < 256 if mode.block_size == 256 else len(prompt) < 64


def report(reference: Reference, modes: int, note: Note) -> None:
    """Print the close calls, which must be at few places."""
    for call in reference.close_calls:
        note(call)
    assert len(reference.close_places) <= modes
