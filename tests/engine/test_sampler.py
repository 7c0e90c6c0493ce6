"""The sampler against transformers' logits processors, and against dense float64 arithmetic."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from octavo.engine.sampler import Sampler
from octavo.engine.sampling_batch import build_batch
from octavo.engine.sampling_params import SamplingParams
from tests.engine.sampling import FILTERS, normal, row

DRAWS = 4096
ALMOST_ONE = 1 - 2.0**-53


def swept(logits: Tensor, params: SamplingParams, **rest: Any) -> npt.NDArray[np.float64]:
    """The share of each token when one row's uniform sweeps an even grid: its probability, to one step of the grid."""
    batch = build_batch([row(params, **rest)] * DRAWS)
    batch.uniforms = (np.arange(DRAWS) + 0.5) / DRAWS
    chosen = Sampler()(logits.expand(DRAWS, -1), batch).token_ids
    return np.bincount(chosen, minlength=len(logits)) / DRAWS


def transformers_distribution(logits: Tensor, params: SamplingParams, ids: Sequence[int] = ()) -> Tensor:
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        steps.append(TypicalLogitsWarper(params.typical_p))
    scores: Tensor = steps(torch.tensor([ids], dtype=torch.int64), logits.double()[None])  # type: ignore[arg-type]
    return scores.softmax(-1)[0]


def assert_same_distribution(shares: npt.NDArray[np.float64], expected: Tensor) -> None:
    np.testing.assert_allclose(shares, expected.numpy(), rtol=0, atol=1.001 / DRAWS)
    assert not shares[expected.numpy() == 0].any()


@pytest.mark.parametrize("vocab", [50, 256, 700])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_each_token_comes_with_the_probability_that_transformers_gives_it(fields: dict[str, Any], vocab: int) -> None:
    logits = normal(vocab, scale=1.5)
    params = SamplingParams(**fields)
    shares = swept(logits, params, prompt=[3, 5, 5], output_ids=[7, 3])
    assert_same_distribution(shares, transformers_distribution(logits, params, [3, 5, 5, 7, 3]))


@settings(derandomize=True, deadline=None, max_examples=60, phases=[Phase.generate])  # shrinking takes minutes
@given(
    st.integers(0, 10**6),
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.05, 5),
            "top_k": st.integers(0, 60),
            "top_p": st.floats(0.01, 1),
            "min_p": st.floats(0, 1) | st.just(0.0),
            "typical_p": st.floats(0.01, 1) | st.just(1.0),
            "repetition_penalty": st.floats(0.5, 2) | st.just(1.0),
        }
    ),
)
def test_any_filters_together_are_those_of_transformers(seed: int, fields: dict[str, Any]) -> None:
    logits, params = normal(50, seed=seed, scale=2.0), SamplingParams(**fields)
    shares = swept(logits, params, prompt=[1, 2], output_ids=[3])
    assert_same_distribution(shares, transformers_distribution(logits, params, [1, 2, 3]))


def test_filters_keep_all_tokens_that_tie_with_the_last_one_kept() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    top_k = swept(logits, SamplingParams(top_k=2))
    assert_same_distribution(top_k, transformers_distribution(logits, SamplingParams(top_k=2)))
    top_p = swept(logits, SamplingParams(top_p=0.6))
    assert_same_distribution(top_p, logits.double().masked_fill(logits < 2, -torch.inf).softmax(-1))


def test_a_long_tie_at_the_edge_of_the_nucleus_reaches_past_the_leading_tokens() -> None:
    logits = torch.zeros(1000)
    logits[0] = 3.0
    assert_same_distribution(swept(logits, SamplingParams(top_p=0.5, top_k=300)), logits.double().softmax(-1))


def test_frequency_and_presence_penalties_count_generated_tokens_alone() -> None:
    logits, output = normal(40, scale=0.3), [3, 3, 3, 5]
    counts = torch.bincount(torch.tensor(output), minlength=40).double()
    expected = (logits.double() - 0.7 * counts - 0.4 * (counts > 0)).softmax(-1)
    params = SamplingParams(frequency_penalty=0.7, presence_penalty=0.4)
    assert_same_distribution(swept(logits, params, prompt=[1, 3, 9], output_ids=output), expected)


def test_biases_and_bans_come_before_penalties() -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, 2.0])
    params = SamplingParams(logit_bias={1: 3.0, 3: -5.0, 99: 1.0}, repetition_penalty=2.0)
    expected = torch.tensor([-torch.inf, 2.0 / 2, 0.5, -3.0 * 2]).double().softmax(-1)
    assert_same_distribution(swept(logits, params, prompt=[1, 3], banned=(0, 77)), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_biased_token_can_be_banned(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias={2: 100.0})
    shares = swept(normal(8), params, banned=(2,))
    assert shares[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_rows_take_the_argmax(dtype: torch.dtype) -> None:
    logits = normal(9, 300).to(dtype)
    batch = build_batch([row(SamplingParams(temperature=0))] * 9)
    assert batch.argmax_only
    sampled = Sampler()(logits, batch)
    assert sampled.token_ids.dtype == np.int64
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert sampled.logprobs is None
    assert sampled.top_token_ids is None


def test_greedy_rows_obey_penalties_and_bans() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]]).expand(3, -1)
    greedy, repeating = SamplingParams(temperature=0), SamplingParams(temperature=0, repetition_penalty=2.0)
    rows = [row(greedy), row(greedy, banned=(0, 1)), row(repeating, prompt=[0])]
    assert Sampler()(logits, build_batch(rows)).token_ids.tolist() == [0, 2, 1]
    assert Sampler()(logits[:2], build_batch(rows[:2])).token_ids.tolist() == [0, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = normal(5, 300) + 50
    batch = build_batch([row(SamplingParams(temperature=temperature), seed=each) for each in range(5)])
    assert Sampler()(logits, batch).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [10, 256, 1000])
def test_the_ends_of_the_uniform_find_tokens_that_may_come(vocab: int) -> None:
    for seed in range(20):
        logits = normal(vocab, seed=seed).expand(2, -1).clone()
        logits[:, [0, -1]] = -torch.inf
        batch = build_batch([row(SamplingParams())] * 2)
        batch.uniforms = np.array([0.0, ALMOST_ONE])
        assert Sampler()(logits, batch).token_ids.tolist() == [1, vocab - 2]


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should() -> None:
    """A million tokens of 1e-8 each behind a likely one: a cumulative sum in float32 would not move."""
    logits = torch.full((1, 10**6), float(np.log(1e-8)))
    logits[0, 0] = 0.0
    cumulative = np.exp(logits[0].double().numpy()).cumsum()
    uniforms = np.linspace(1 / cumulative[-1], ALMOST_ONE, 7)
    found = []
    for each in uniforms:
        batch = build_batch([row(SamplingParams())])
        batch.uniforms = np.array([each])
        found.append(int(Sampler()(logits, batch).token_ids[0]))
    np.testing.assert_allclose(found, np.searchsorted(cumulative, uniforms * cumulative[-1]), atol=2)
