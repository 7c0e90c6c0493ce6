"""What the sampler promises of a whole step: rows that do not depend on each other, log-probabilities, processors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.engine.sampled import TokenLogprobs
from octavo.engine.sampler import Sampler, prompt_logprobs
from octavo.engine.sampling_batch import build_batch, uniform
from octavo.engine.sampling_params import SamplingParams
from tests.engine.sampling import FILTERS, normal, row

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"logprobs": 3},
    {"temperature": 0, "logprobs": 1},
    {"presence_penalty": 1.0},
    *FILTERS,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    rows = [
        row(SamplingParams(**fields), seed=seed, position=seed % 5 * 50, prompt=[1, 2], output_ids=[4] * (seed % 3))
        for seed, fields in enumerate(MIXED * 3)
    ]
    logits = normal(len(rows), 600, scale=1.0).to(dtype)
    alone = [int(Sampler()(logits[[at]], build_batch([each])).token_ids[0]) for at, each in enumerate(rows)]
    order = np.random.default_rng(0).permutation(len(rows))
    together = Sampler()(logits[order], build_batch([rows[at] for at in order])).token_ids
    assert together.tolist() == [alone[at] for at in order]


def test_uniforms_are_the_philox_stream_of_the_seed() -> None:
    for seed in (0, 1, 2**64 - 1, 2**127 + 5):
        stream = np.random.Generator(np.random.Philox(key=seed)).random(200)
        assert [uniform(seed, position) for position in range(200)] == stream.tolist()
    assert uniform(-1, 3) == uniform(2**128 - 1, 3)


def test_a_batch_takes_its_uniforms_from_seed_and_position() -> None:
    params = SamplingParams()
    batch = build_batch([row(params, 5, 3), row(params, 6, 3), row(SamplingParams(temperature=0), 5, 3)])
    assert batch.uniforms.tolist() == [uniform(5, 3), uniform(6, 3), 0.0]


@pytest.mark.parametrize("fields", [{}, {"logit_bias": {1: 2.0}}, {"top_p": 0.5}, {"temperature": 0, "logprobs": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_as_they_are(fields: dict[str, Any], dtype: torch.dtype) -> None:
    logits = normal(3, 100).to(dtype)
    before = logits.clone()
    Sampler()(logits, build_batch([row(SamplingParams(**fields), seed=each) for each in range(3)]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_unmodified_logits(dtype: torch.dtype) -> None:
    logits = normal(4, 50).to(dtype)
    rows = [
        row(SamplingParams(logprobs=4, temperature=0.2, top_k=2, repetition_penalty=1.5), prompt=[1, 2]),
        row(SamplingParams()),
        row(SamplingParams(temperature=0, logprobs=0)),
        row(SamplingParams(temperature=0, logprobs=99), banned=(int(logits[3].argmax()),)),
    ]
    sampled = Sampler()(logits, build_batch(rows))
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_logprobs is not None
    expected = logits.double().log_softmax(-1).numpy()
    chosen = expected[np.arange(4), sampled.token_ids]
    assert sampled.logprobs.dtype == np.float32
    assert np.isnan(sampled.logprobs).tolist() == [False, True, False, False]
    np.testing.assert_allclose(sampled.logprobs[[0, 2, 3]], chosen[[0, 2, 3]], atol=1e-5)
    assert [len(ids) for ids in sampled.top_token_ids] == [4, 0, 0, 50]
    for each, (ids, logprobs) in enumerate(zip(sampled.top_token_ids, sampled.top_logprobs, strict=True)):
        np.testing.assert_allclose(logprobs, expected[each, ids], atol=1e-5)
        np.testing.assert_allclose(logprobs, np.sort(expected[each])[::-1][: len(ids)], atol=1e-5)


def test_ranking_by_best_of_gets_the_chosen_tokens_logprobs() -> None:
    sampled = Sampler()(
        normal(2, 50), build_batch([row(SamplingParams(best_of=2)), row(SamplingParams(n=2, best_of=2))])
    )
    assert sampled.logprobs is not None
    assert np.isnan(sampled.logprobs).tolist() == [False, True]


def test_prompt_logprobs_match_a_dense_log_softmax() -> None:
    logits, following = normal(600, 40).half(), np.arange(600) % 40
    found = TokenLogprobs(*(tensor.numpy() for tensor in prompt_logprobs(logits, following, 3)))
    expected = logits.double().log_softmax(-1)
    np.testing.assert_allclose(found.logprobs, expected[range(600), following], atol=1e-5)
    assert (found.top_token_ids == expected.topk(3).indices.numpy()).mean() > 0.99  # half precision has ties
    np.testing.assert_allclose(found.top_logprobs, expected.topk(3).values, atol=1e-5)
    assert found.logprobs.dtype == found.top_logprobs.dtype == np.float32
    for tokens, k in ((2, 0), (0, 5)):
        assert prompt_logprobs(logits[:tokens], following[:tokens], k)[1].shape == (tokens, k)


def test_processors_see_their_row_after_penalties() -> None:
    seen: list[tuple[list[int], Tensor]] = []

    class Force:
        def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
            seen.append((list(output_ids), logits.clone()))
            logits[:] = -torch.inf
            return logits.index_fill(0, torch.tensor([4]), 0.0)

    greedy = SamplingParams(temperature=0)
    logits = normal(2, 10).bfloat16()
    assert Sampler()(logits, build_batch([row(greedy)] * 2), [(1, Force(), [7])]).token_ids.tolist() == [
        int(logits[0].argmax()),
        4,
    ]
    rows = [row(SamplingParams(presence_penalty=2.0), output_ids=[6]), row(SamplingParams())]
    assert Sampler()(logits, build_batch(rows), [(0, Force(), [6])]).token_ids[0] == 4
    assert [ids for ids, _ in seen] == [[7], [6]]
    assert [each.dtype for _, each in seen] == [torch.float32] * 2
    torch.testing.assert_close(seen[1][1][6], logits[0, 6].float() - 2.0)


def test_a_processor_that_panics_fails_its_row_alone() -> None:
    class PanicException(BaseException):
        """As PyO3's, for a panic in Rust."""

    def panics(output_ids: Sequence[int], logits: Tensor) -> Tensor:
        raise PanicException("unwrap on None")

    logits = normal(2, 10)
    sampled = Sampler()(logits, build_batch([row(SamplingParams(temperature=0))] * 2), [(1, panics, [7])])
    assert sampled.token_ids[0] == int(logits[0].argmax())
    assert {failed: str(error) for failed, error in sampled.failed.items()} == {1: "unwrap on None"}


def test_histories_may_be_arrays_or_lists() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2)
    logits = normal(2, 10)
    rows = [row(params, output_ids=[1, 2]), row(params, output_ids=np.array([1, 2], dtype=np.int32))]
    history = build_batch(rows).history
    assert history.tokens[history.rows == 0].tolist() == history.tokens[history.rows == 1].tolist()
    assert Sampler()(logits[[0, 0]], build_batch(rows)).token_ids.tolist()


NAN_SAFE: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.1}, {"logprobs": 2}]


def test_a_row_of_nan_harms_no_other_row() -> None:
    logits = normal(3, 300)
    logits[1] = torch.nan
    for fields in NAN_SAFE:
        rows = [row(SamplingParams(**fields), seed=each) for each in range(3)]
        found = Sampler()(logits, build_batch(rows)).token_ids
        assert 0 <= found[1] < 300
        without = Sampler()(logits[[0, 2]], build_batch([rows[0], rows[2]])).token_ids
        assert found[[0, 2]].tolist() == without.tolist()


def test_an_empty_batch_gives_no_tokens() -> None:
    assert Sampler()(torch.empty(0, 10), build_batch([])).token_ids.shape == (0,)


def test_logits_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for a batch of 1"):
        Sampler()(normal(2, 10), build_batch([row(SamplingParams())]))


# Invariant: nothing of a row depends on what else is in the batch


def test_an_invariant_row_keeps_what_was_drawn_or_is_sampled_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So its sums are taken as ever, whichever kernel takes them."""

    def ban(output_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.arange(500), -torch.inf)

    def fail(output_ids: Sequence[int], logits: Tensor) -> Tensor:
        raise RuntimeError("no more")

    rows = [
        row(SamplingParams(**fields), seed=seed, position=seed % 5 * 50, prompt=[1, 2], output_ids=[4] * (seed % 3))
        for seed, fields in enumerate([*MIXED, {"logit_bias": {3: 9.0}}, {"temperature": 0}, {}])
    ]
    processors = [(len(rows) - 2, ban, [4]), (len(rows) - 1, fail, [])]
    logits, drawn = normal(len(rows), 600, scale=1.0), torch.arange(len(rows)) + 100
    alone = [int(Sampler()(logits[[at]], build_batch([each])).token_ids[0]) for at, each in enumerate(rows)]
    alone[-2] = 500 + int(logits[-2, 500:].argmax())
    shapes: list[tuple[int, ...]] = []
    tokens = Sampler._tokens

    def watching(self: Sampler, given: Tensor, *rest: Any) -> Tensor:
        shapes.append(given.shape)
        return tokens(self, given, *rest)

    monkeypatch.setattr(Sampler, "_tokens", watching)
    chosen = Sampler(invariant=True).choose(logits, build_batch(rows), processors, drawn)
    own = {at for at, fields in enumerate(MIXED) if fields.keys() - {"temperature", "logprobs"}} | {len(MIXED)}
    expected = [alone[at] if at in own else 100 + at for at in range(len(MIXED) + 1)] + [alone[-2]]
    assert chosen.token_ids.tolist()[:-1] == expected
    assert {at: str(error) for at, error in chosen.failed.items()} == {len(rows) - 1: "no more"}
    assert shapes == [(1, 600)] * (len(own) + 2)
    assert drawn.tolist() == (torch.arange(len(rows)) + 100).tolist()


@pytest.mark.parametrize("vocab", [1003, 1008])
def test_of_equals_the_same_are_told_whatever_others_ask_for(vocab: int) -> None:
    logits = torch.randint(0, 4, (3, vocab), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = np.lexsort((np.arange(vocab), -logits[0].float().numpy()))
    logprobs = logits[0].double().log_softmax(-1).numpy()[ids]
    for wanted in ([5], [5, 0, 900]):
        batch = build_batch([row(SamplingParams(logprobs=one, temperature=0)) for one in wanted])
        drawn = torch.zeros(len(wanted), dtype=torch.int64)
        chosen = Sampler(invariant=True).choose(logits[: len(wanted)], batch, drawn=drawn)
        sampled = chosen.sampled([tensor.numpy() for tensor in chosen.tensors])
        assert sampled.top_token_ids is not None
        assert sampled.top_logprobs is not None
        assert sampled.top_token_ids[0].tolist() == ids[:5].tolist()
        np.testing.assert_allclose(sampled.top_logprobs[0], logprobs[:5], atol=1e-5)
    found = prompt_logprobs(logits, np.zeros(3, dtype=np.int64), 7, invariant=True)[1]
    assert found[0].tolist() == ids[:7].tolist()
