"""`octavo.LLM` on a tiny Llama: texts and tokens in, results in their order, and nothing left behind."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from octavo import LLM, SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.outputs import Completion, RequestOutput
from tests import checkpoints
from tests.engine.harness import generate, load_reference

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return load(folder)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """With an empty cache; afterwards no request and no block may be left in use."""
    shared.engine.scheduler.kv.reset()
    yield shared
    assert_clean(shared)


def load(folder: Path, tokens: int = 8192, **settings: Any) -> LLM:
    return LLM(folder, block_size=BLOCK, max_batch_total_tokens=tokens, device="cpu", progress=False, **settings)


def assert_clean(llm: LLM) -> None:
    stats = llm.engine.scheduler.kv.stats()
    assert not llm.engine.busy
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running
    assert (stats.held, stats.free + stats.cached) == (0, stats.total)
    llm.engine.scheduler.kv.check()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "temperature": 0, "ignore_eos": True} | params)


def drawn(tokens: int = 12, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True} | params)


def one(results: Sequence[RequestOutput]) -> Completion:
    (result,) = results
    (completion,) = result.completions
    return completion


# What goes in and comes out


def test_results_come_in_the_order_of_the_prompts(llm: LLM, model: Any) -> None:
    """Whatever their lengths, and each with its own number of tokens."""
    prompts = [prompt_of(length, length) for length in (200, 3, 1, 50, 17)]
    counts = [3, 12, 7, 1, 20]
    results = llm.generate(prompts, [greedy(count) for count in counts], progress=False)
    assert [result.prompt_token_ids for result in results] == prompts
    for result, prompt, count in zip(results, prompts, counts, strict=True):
        (completion,) = result.completions
        assert result.prompt is None
        assert completion.token_ids == generate(model, prompt, count)
        assert completion.finish_reason == "length"
        assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
        assert (completion.index, completion.logprobs, completion.error) == (0, None, None)


def test_a_text_is_its_tokens(llm: LLM, folder: Path) -> None:
    text = "Blocks, pages, tables – 日本"
    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    as_text, as_tokens = llm.generate(text, greedy(), progress=False), llm.generate(ids, greedy(), progress=False)
    both = llm.generate([text, ids], greedy(), progress=False)
    assert one(as_text).token_ids == one(as_tokens).token_ids
    assert [result.prompt for result in both] == [text, None]
    assert [result.completions[0].token_ids for result in both] == [one(as_text).token_ids] * 2
    assert both[0].prompt_token_ids == both[1].prompt_token_ids == ids


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], progress=False) == []


def test_without_max_tokens_an_answer_goes_on_to_the_models_limit(llm: LLM) -> None:
    completion = one(llm.generate(prompt_of(1000), greedy(max_tokens=None), progress=False))
    assert len(completion.token_ids) == 1024 - 1000
    assert completion.finish_reason == "length"


def test_progress_stays_off_what_is_piped_on(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([prompt_of(3)], greedy(2), progress=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([prompt_of(3)], greedy(2), progress=True)
    assert capsys.readouterr().out == ""


# What is refused


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([prompt_of(3), []], greedy(), "prompt 1: the prompt has no tokens"),
        (["hello", ""], greedy(), "prompt 1: the prompt has no tokens"),
        ([[1, 260]], greedy(), "prompt 0: token id 260 .* not in the vocabulary: 0 to 259"),
        ([[1], [-5]], greedy(), "prompt 1: token id -5"),
        ([[1], [2**70]], greedy(), "prompt 1: .*vocabulary"),
        ([prompt_of(1024)], greedy(1), r"prompt 0: the prompt has 1024 tokens, the limit is 1023 \(max_input_tokens\)"),
        ([prompt_of(1000)], greedy(25), "prompt 0: .*1000 .* 25 .*1025.* 1024 .*ask for at most 24"),
        ([prompt_of(2)] * 3, [greedy()] * 2, "3 prompts and 2 sampling parameters"),
    ],
)
def test_one_bad_prompt_and_nothing_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    """The `llm` fixture sees that nothing of the good ones stays in the engine."""
    steps = llm.engine.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, progress=False)
    assert llm.engine.steps == steps


def test_a_prompt_larger_than_the_cache_is_refused_when_the_model_could_take_it(folder: Path) -> None:
    llm = load(folder, tokens=256)
    with pytest.raises(RequestRefused, match="the limit is 255"):
        llm.generate(prompt_of(300), greedy(), progress=False)
    assert_clean(llm)


def test_a_text_needs_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    llm = load(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as token ids"):
        llm.generate(["hello"], progress=False)
    assert_clean(llm)
    completion = one(llm.generate([prompt_of(5)], greedy(), progress=False))
    assert (len(completion.token_ids), completion.text) == (8, "")


def test_a_step_that_fails_is_told_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one(llm.generate(prompt_of(40), greedy(), progress=False)).token_ids
    llm.engine.scheduler.kv.reset()
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.engine.runner), "launch", failing)
        results = llm.generate([prompt_of(40)] * 2, greedy(), progress=False)
    assert [result.completions[0].finish_reason for result in results] == ["error"] * 2
    assert {result.completions[0].error for result in results} == {"RuntimeError: the device is gone"}
    assert_clean(llm)
    assert one(llm.generate(prompt_of(40), greedy(), progress=False)).token_ids == expected


def failing(runner: Any, step: Any) -> Any:
    raise RuntimeError("the device is gone")


# Ends


def test_stop_texts_stand_across_tokens(llm: LLM) -> None:
    """A token is a byte here, so that each stop text of some length does."""
    whole = one(llm.generate(prompt_of(30, 5), greedy(40), progress=False))
    text, characters = whole.text, [index for index, letter in enumerate(whole.text[:-3]) if letter.isascii()]
    start = next(index for index in characters if index > 3 and text[index : index + 3].isascii())
    stop = text[start : start + 3]
    results = [
        one(llm.generate(prompt_of(30, 5), greedy(40, **more), progress=False))
        for more in ({"stop": stop}, {"stop": ["never", stop]}, {"stop": stop, "include_stop_text": True})
    ]
    first = text.index(stop)
    for completion in results:
        assert completion.finish_reason == "stop"
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < 40
    assert [completion.text for completion in results] == [text[:first], text[:first], text[: first + 3]]


def test_a_stop_text_at_the_very_end_is_the_reason_and_cut(llm: LLM) -> None:
    """The answer's last token completes it: there is nothing to cancel any more."""
    text = one(llm.generate(prompt_of(30, 5), greedy(40), progress=False)).text
    end = next(
        index for index, letter in enumerate(text) if letter.isascii() and letter not in text[:index] and index > 5
    )
    tokens = next(
        n for n in range(1, 41) if text[end] in one(llm.generate(prompt_of(30, 5), greedy(n), progress=False)).text
    )
    completion = one(llm.generate(prompt_of(30, 5), greedy(tokens, stop=text[end]), progress=False))
    assert (completion.finish_reason, completion.text) == ("stop", text[:end])
    assert len(completion.token_ids) == tokens


def test_stop_token_ids_end_an_answer_with_that_token(llm: LLM, model: Any) -> None:
    prompt = prompt_of(20, 3)
    expected = generate(model, prompt, 30)
    stop = expected[9]
    length = expected.index(stop) + 1
    completion = one(llm.generate(prompt, greedy(30, stop_token_ids=[stop]), progress=False))
    assert completion.token_ids == expected[:length]
    assert completion.finish_reason == "eos"


def test_the_models_end_token_ends_an_answer_unless_it_is_ignored(folder: Path, tmp_path: Path, model: Any) -> None:
    """As transformers' `generate` does it, with an end token that this prompt's answer has."""
    prompt = prompt_of(20, 3)
    expected = generate(model, prompt, 30)
    end = expected[9]
    length = expected.index(end) + 1
    llm = load(checkpoints.make("llama", tmp_path, eos_token_id=end))
    plain, ignoring, longer = (
        one(llm.generate(prompt, params, progress=False))
        for params in (greedy(30, ignore_eos=False), greedy(30), greedy(30, ignore_eos=False, min_tokens=length))
    )
    assert (plain.token_ids, plain.finish_reason) == (expected[:length], "eos")
    assert (ignoring.token_ids, ignoring.finish_reason) == (expected, "length")
    assert longer.token_ids[: length - 1] == expected[: length - 1]
    assert longer.token_ids[length - 1] != end, "banned, another token came"
    assert len(longer.token_ids) > length


# Log-probabilities


@torch.inference_mode()
def logprobs_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' [tokens, vocab]: row i is what follows tokens[: i + 1]."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_the_models_own(llm: LLM, model: Any, top: int, temperature: float) -> None:
    """Neither temperature nor a penalty shows in them."""
    prompt = prompt_of(40, 1)
    params = greedy(10, logprobs=top, temperature=temperature, seed=1, repetition_penalty=1.3)
    completion = one(llm.generate(prompt, params, progress=False))
    truth = logprobs_of(model, prompt + completion.token_ids)[len(prompt) - 1 :]
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    for entry, expected in zip(completion.logprobs, truth, strict=False):
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        assert_likeliest(entry.top, expected, top)


def assert_likeliest(found: Sequence[tuple[int, float]], expected: Tensor, count: int) -> None:
    likeliest = expected.topk(count)
    assert [value for _, value in found] == pytest.approx(likeliest.values.tolist(), abs=1e-4)
    assert [float(expected[token]) for token, _ in found] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [None, 7, 32])
def test_prompt_logprobs_are_the_models_own(folder: Path, model: Any, chunk: int | None) -> None:
    """In chunks too, and though the prompt is in the cache, from which a request that wants them does not take it."""
    llm = load(folder, max_batch_prefill_tokens=chunk)
    prompts = [prompt_of(length, 2) for length in (40, 1, 17, 40)]
    params = [greedy(4, prompt_logprobs=top) for top in (3, 0, 2, 0)]
    for _ in range(2):
        results = llm.generate(prompts, params, progress=False)
        assert [result.cached_tokens for result in results] == [0] * 4
        for result, prompt, wanted in zip(results, prompts, params, strict=True):
            found = result.prompt_logprobs
            if len(prompt) == 1:
                assert found in (None, [None])
                continue
            assert found is not None
            assert len(found) == len(prompt)
            assert found[0] is None
            truth = logprobs_of(model, prompt)
            for entry, token, expected in zip(found[1:], prompt[1:], truth, strict=False):
                assert entry is not None
                assert entry.token_id == token
                assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
                assert_likeliest(entry.top, expected, wanted.prompt_logprobs or 0)
        llm.generate(prompts, greedy(4), progress=False)
    assert_clean(llm)
