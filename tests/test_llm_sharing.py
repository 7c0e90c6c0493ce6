"""`octavo.LLM`: several answers to one prompt, seeds, streams, and what is computed only once."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.runner import Runner
from octavo.outputs import RequestOutput
from tests import checkpoints
from tests.test_llm import BLOCK, assert_clean, drawn, greedy, load, one, prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = load(folder)
    yield llm
    assert_clean(llm)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each step computed."""
    counts: list[int] = []
    launch = Runner.launch

    def counting(runner: Runner, step: Any) -> Any:
        counts.append(len(step.token_ids))
        return launch(runner, step)

    monkeypatch.setattr(Runner, "launch", counting)
    return counts


# Prompts that are computed once


def test_of_eight_equal_prompts_seven_are_cached(llm: LLM, computed: list[int]) -> None:
    prompt = prompt_of(600)
    results = llm.generate([prompt] * 8, greedy(), progress=False)
    first, *others = results
    assert first.cached_tokens == 0
    assert all(600 - BLOCK <= result.cached_tokens < 600 for result in others)
    assert sum(computed) <= 600 + 7 * BLOCK + 8 * 7
    assert all(result.completions == first.completions for result in others)


def test_prompts_that_are_longer_than_a_step_takes_are_shared_as_well(folder: Path, computed: list[int]) -> None:
    llm = load(folder, max_batch_prefill_tokens=64)
    computed.clear()  # of the step that is measured at the start
    results = llm.generate([prompt_of(600)] * 8, greedy(), progress=False)
    assert all(600 - BLOCK <= result.cached_tokens < 600 for result in results[1:])
    assert sum(computed) <= 600 + 7 * BLOCK + 8 * 7


def test_a_second_turn_reuses_the_first_answer(llm: LLM, computed: list[int]) -> None:
    prompt = prompt_of(50)
    answer = one(llm.generate(prompt, greedy(37), progress=False)).token_ids
    computed.clear()
    (second,) = llm.generate([[*prompt, *answer, *prompt_of(10, 1)]], greedy(5), progress=False)
    # The answer's last token was sampled, but never computed.
    assert second.cached_tokens == 50 + 37 - 1
    assert sum(computed) == 1 + 10 + 5 - 1
    llm.engine.scheduler.kv.reset()
    (fresh,) = llm.generate([second.prompt_token_ids], greedy(5), progress=False)
    assert fresh.cached_tokens == 0
    assert fresh.completions == second.completions


def test_prefix_caching_can_be_off(folder: Path) -> None:
    llm = load(folder, prefix_caching=False)
    for _ in range(2):
        results = llm.generate([prompt_of(100)] * 3, greedy(), progress=False)
        assert [result.cached_tokens for result in results] == [0] * 3
    assert llm.engine.scheduler.kv.stats().cached == 0


# Several answers


@pytest.mark.parametrize(("n", "best_of"), [(4, None), (2, 5), (1, 3), (3, 3)])
def test_answers_to_one_prompt_share_its_blocks(llm: LLM, computed: list[int], n: int, best_of: int | None) -> None:
    """At most one block's worth of the prompt is computed again for each."""
    held: list[int] = []
    launch = llm.engine.runner.launch

    def watching(step: Any) -> Any:
        held.append(llm.engine.scheduler.kv.stats().held)
        return launch(step)

    llm.engine.runner.launch = watching  # type: ignore[method-assign]
    (result,) = llm.generate(prompt_of(200), drawn(10, n=n, best_of=best_of, seed=3), progress=False)
    sequences = best_of or n
    assert len(result.completions) == n
    assert len({tuple(completion.token_ids) for completion in result.completions}) == n
    assert sum(computed) <= 200 + (sequences - 1) * BLOCK + 9 * sequences
    shared = 200 // BLOCK
    assert max(held) <= shared + 2 * sequences
    assert result.cached_tokens == 0, "the first of them computed the prompt"


def test_the_best_are_those_of_highest_mean_logprob(llm: LLM) -> None:
    """They are the same that would have come without a choice, the best first."""
    prompt, seed = prompt_of(30), 11
    (every,) = llm.generate(prompt, drawn(10, n=6, seed=seed, logprobs=0), progress=False)
    (best,) = llm.generate(prompt, drawn(10, n=2, best_of=6, seed=seed), progress=False)
    ranking = sorted(every.completions, key=lambda completion: -completion.mean_logprob)
    assert [completion.token_ids for completion in best.completions] == [c.token_ids for c in ranking[:2]]
    assert [completion.logprobs for completion in best.completions] == [None, None]


# Seeds


def seeded(llm: LLM, prompts: Sequence[list[int]], **params: Any) -> list[list[list[int]]]:
    wanted = [drawn(20, seed=number, top_p=0.95, **params) for number in range(len(prompts))]
    return tokens_of(llm.generate(prompts, wanted, progress=False))


def tokens_of(results: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in result.completions] for result in results]


def test_a_seed_gives_the_same_tokens_alone_among_others_and_after_preemption(folder: Path) -> None:
    """And in chunks, and from the cache: the tokens are the request's own affair."""
    prompts = [prompt_of(20 + number, number) for number in range(33)]
    roomy, tight = load(folder), load(folder, tokens=480, max_batch_prefill_tokens=64)
    together = seeded(roomy, prompts, n=2)
    assert len({str(tokens) for tokens in together}) == 33
    for number in (0, 7, 32):
        alone = roomy.generate(prompts[number], drawn(20, seed=number, top_p=0.95, n=2), progress=False)
        assert tokens_of(alone) == [together[number]]
    assert seeded(tight, prompts, n=2) == together
    assert tight.engine.scheduler.preemptions > 0


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    results = tokens_of(llm.generate([prompt_of(20)] * 4, drawn(20), progress=False))
    assert len({str(tokens) for tokens in results}) == 4


def test_another_seed_gives_other_tokens(llm: LLM) -> None:
    results = llm.generate([prompt_of(20)] * 4, [drawn(20, seed=seed) for seed in (1, 2, 1, 3)], progress=False)
    first, second, third, fourth = tokens_of(results)
    assert first == third
    assert len({str(first), str(second), str(fourth)}) == 3


# Streams


@pytest.mark.parametrize("params", [greedy(20), drawn(20, seed=5, n=3), greedy(20, logprobs=2), greedy(20, stop="~")])
def test_a_stream_brings_what_generate_returns(llm: LLM, params: SamplingParams) -> None:
    prompt = "Once upon a time – 昔々"
    (result,) = llm.generate(prompt, params, progress=False)
    tokens = list(llm.stream(prompt, params))
    for completion in result.completions:
        mine = [token for token in tokens if token.index == completion.index]
        assert [token.token_id for token in mine if token.token_id is not None] == completion.token_ids
        assert "".join(token.text for token in mine) == completion.text
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        if completion.logprobs is not None:
            for token, expected in zip(mine, completion.logprobs, strict=True):
                assert token.logprob is not None
                assert token.logprob.logprob == pytest.approx(expected.logprob, abs=1e-4)
                assert [best for best, _ in token.logprob.top] == [best for best, _ in expected.top]


def test_tokens_come_as_they_are_computed(llm: LLM) -> None:
    before = llm.engine.steps
    stream = llm.stream(prompt_of(10), greedy(20))
    assert llm.engine.steps == before
    next(stream)
    next(stream)
    assert llm.engine.steps == before + 2
    assert len(list(stream)) == 18


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_frees_its_blocks(llm: LLM, taken: int) -> None:
    stream: Any = llm.stream(prompt_of(100), drawn(50, n=3, seed=1))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert_clean(llm)


def test_a_stream_that_is_forgotten_frees_its_blocks(llm: LLM) -> None:
    for taken in (0, 2):
        stream = llm.stream(prompt_of(100), greedy(50))
        for _ in range(taken):
            next(stream)
        del stream
        assert_clean(llm)


def test_streams_take_turns_and_generate_runs_beside_them(llm: LLM) -> None:
    """Each gets its own tokens, whoever makes the engine step."""
    prompts = [prompt_of(30, seed) for seed in range(4)]
    expected = [tokens for (tokens,) in tokens_of(llm.generate(prompts, greedy(12), progress=False))]
    streams = [llm.stream(prompt, greedy(12)) for prompt in prompts[:3]]
    found: list[list[int | None]] = [[], [], []]
    for _ in range(4):
        for tokens, stream in zip(found, streams, strict=True):
            tokens.append(next(stream).token_id)
    assert one(llm.generate(prompts[3], greedy(12), progress=False)).token_ids == expected[3]
    for tokens, stream in zip(found, streams, strict=True):
        tokens += [token.token_id for token in stream]
    assert found == expected[:3]


def test_threads_share_an_engine(llm: LLM) -> None:
    prompts = [prompt_of(30, seed) for seed in range(8)]
    expected = tokens_of(llm.generate(prompts, greedy(12), progress=False))
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda prompt: llm.generate(prompt, greedy(12), progress=False), prompts))
    assert [tokens_of(result)[0] for result in results] == expected


def test_what_cannot_be_streamed_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"best_of=3 with n=1 cannot be streamed"):
        llm.stream(prompt_of(3), drawn(best_of=3))
    with pytest.raises(ValueError, match="no tokens"):
        llm.stream([])
