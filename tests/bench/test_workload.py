"""Requests: the same for the same seed, with lengths as asked for, from ShareGPT or drawn at random."""

import math
from pathlib import Path
from statistics import median

import pytest

from octavo.bench.workload import LOG_NORMAL, PROMPT_LENGTH, SHAREGPT, Range, Source, Uniform, first_turns
from tests.checkpoints import VOCABULARY


def source(tiny: Path, sharegpt: bool | None = None) -> Source:
    return Source.of(tiny, sharegpt)


def test_first_turns_are_a_question_and_its_answer(sharegpt: str) -> None:
    """In a file that breaks off: the last conversation is lost, and one that begins with an answer is left out."""
    assert list(first_turns(sharegpt)) == [("a" * 10, "b" * 20), ("f" * 11, "g" * 100), ("h" * 50, "i" * 30)]


def test_sharegpt_is_taken_if_it_is_installed(tiny: Path, sharegpt: str) -> None:
    found = source(tiny)
    assert found.name == SHAREGPT
    assert found.tokenizer is not None
    exchanges = found.generation(2, Range(10, 20), Range(3, 4), seed=0)
    assert sorted(found.tokenizer.decode(list(prompt)) for prompt, _ in exchanges) == ["a" * 10, "f" * 11]


def test_conversations_have_the_lengths_of_their_answers(tiny: Path, sharegpt: str) -> None:
    exchanges = source(tiny).conversations(3, Range(4, 50), longest_answer=64, seed=0)
    assert sorted((len(prompt), answer) for prompt, answer in exchanges) == [(10, 20), (11, 64), (50, 30)]


def test_too_few_conversations_are_an_error(tiny: Path, sharegpt: str) -> None:
    with pytest.raises(ValueError, match="ShareGPT has 2 first turns of 10 to 20 tokens and 3 are wanted"):
        source(tiny).generation(3, Range(10, 20), Range(1, 1), seed=0)


@pytest.mark.usefixtures("no_sharegpt")
def test_without_sharegpt_lengths_are_drawn(tiny: Path) -> None:
    found = source(tiny)
    assert found.name == LOG_NORMAL
    exchanges = found.generation(200, Range(64, 256), Range(64, 128), seed=0)
    lengths = {len(exchange.prompt) for exchange in exchanges}
    assert 64 <= min(lengths) < 80
    assert 240 < max(lengths) <= 256
    assert {exchange.answer_tokens for exchange in exchanges} <= set(range(64, 129))
    assert all(0 <= token < VOCABULARY for exchange in exchanges for token in exchange.prompt)


@pytest.mark.usefixtures("no_sharegpt")
def test_a_range_may_be_one_length(tiny: Path) -> None:
    exchanges = source(tiny).generation(9, Range(64, 64), Range(128, 128), seed=0)
    assert {(len(exchange.prompt), exchange.answer_tokens) for exchange in exchanges} == {(64, 128)}


@pytest.mark.usefixtures("no_sharegpt")
def test_drawn_lengths_are_log_normal(tiny: Path) -> None:
    exchanges = source(tiny).conversations(4000, Range(1, 10**6), longest_answer=10**6, seed=0)
    logarithms = [math.log(len(exchange.prompt)) for exchange in exchanges]
    above = sum(each > PROMPT_LENGTH.mean + PROMPT_LENGTH.stdev for each in logarithms) / 4000
    assert median(logarithms) == pytest.approx(PROMPT_LENGTH.mean, abs=0.1)
    assert above == pytest.approx(0.159, abs=0.02)


@pytest.mark.usefixtures("no_sharegpt")
def test_asking_for_sharegpt_in_vain(tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install octavo\[bench\]"):
        source(tiny, sharegpt=True)


@pytest.mark.parametrize("real", [True, False])
def test_the_seed_decides(tiny: Path, sharegpt: str, real: bool) -> None:
    def drawn(seed: int) -> list[object]:
        found = source(tiny, real)
        lengths = Range(4, 64)
        return [found.generation(3, lengths, Range(1, 999), seed), found.conversations(3, lengths, 999, seed)]

    assert drawn(1) == drawn(1)
    assert drawn(1)[0] != drawn(2)[0]


def test_uniform_requests_are_those_of_nano_vllms_benchmark() -> None:
    """Which seeds Python's generator with 0 and draws all prompts, then all lengths of answers."""
    exchanges = Uniform(vocabulary=150_000).generation(256, Range(100, 1024), Range(100, 1024), seed=0)
    assert sum(answer for _, answer in exchanges) == 133_966
    assert sum(len(prompt) for prompt, _ in exchanges) == 142_827
    ids = {token for prompt, _ in exchanges for token in prompt}
    assert (min(ids), max(ids)) == (0, 10_000)
    assert list(exchanges[0].prompt[:3]) == [6311, 6890, 663]


def test_uniform_prompts_have_tokens_that_the_model_knows(tiny: Path) -> None:
    found = Uniform.of(tiny)
    assert found.name == f"uniform lengths, random token ids up to {VOCABULARY - 1}"
    exchanges = found.generation(50, Range(7, 7), Range(1, 2), seed=3)
    assert {len(prompt) for prompt, _ in exchanges} == {7}
    assert {answer for _, answer in exchanges} == {1, 2}
    assert max(token for prompt, _ in exchanges for token in prompt) == VOCABULARY - 1


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5)])
def test_a_range_needs_tokens(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"from {low} to {high}"):
        Range(low, high)
