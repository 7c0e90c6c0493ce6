"""Draws for batches that want no more than a temperature are those of the sampler that knows all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.engine.drawing import PlainDraw, compiled_draw, plain_draw
from octavo.engine.sampler import Sampler
from octavo.engine.sampling_batch import build_batch
from octavo.engine.sampling_params import SamplingParams
from tests.engine.sampling import normal, row

VOCABULARY = 700


@pytest.fixture(scope="module", params=["plain", "compiled"])
def draw(request: pytest.FixtureRequest) -> PlainDraw:
    made = plain_draw if request.param == "plain" else compiled_draw(VOCABULARY, torch.float32, torch.device("cpu"))
    assert made is not None
    return made


@torch.inference_mode()
@pytest.mark.parametrize("at_once", [1, 4000])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_the_share_of_each_token_is_its_probability(draw: PlainDraw, temperature: float, at_once: int) -> None:
    """Of uniforms on an even grid: to one step of the grid, by a softmax in float64."""
    grid = 4000 if at_once > 1 else 200
    logits = normal(1, VOCABULARY) * 3
    uniforms = torch.arange(grid, dtype=torch.float64).add(0.5).div(grid)
    found = [
        draw(logits.expand(len(some), -1).contiguous(), torch.full((len(some),), temperature), some.clone())
        for some in uniforms.split(at_once)
    ]
    shares = np.bincount(torch.cat(found).numpy(), minlength=VOCABULARY) / grid
    expected = (logits[0].double() / temperature).softmax(-1)
    np.testing.assert_allclose(shares, expected.numpy(), rtol=0, atol=1.001 / grid)


@torch.inference_mode()
def test_rows_without_a_temperature_take_the_first_of_the_likeliest(draw: PlainDraw) -> None:
    logits = normal(4, VOCABULARY).half().float()
    logits[1, [5, 3, 600]] = logits.max() + 1
    batch = build_batch(
        [row(SamplingParams(temperature=0)), *[row(SamplingParams(temperature=0))] * 2, row(SamplingParams())]
    )
    batch.argmax_only = False
    found = Sampler(draw)(logits, batch).token_ids
    assert found[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert found[1] == 3


@torch.inference_mode()
@pytest.mark.parametrize("banned", [slice(0, 256), slice(256, 512), slice(512, None), slice(0, 699)])
def test_tokens_of_no_probability_never_come(draw: PlainDraw, banned: slice) -> None:
    """However many of them stand side by side, and beside one of all probability."""
    logits = normal(3, VOCABULARY)
    logits[:, banned] = -torch.inf
    allowed = logits[0].isfinite().nonzero()[:, 0].tolist()
    for uniform in (0.0, 0.3, 0.9999999, 1 - 2.0**-53):
        found = draw(logits, torch.tensor([0.0, 1.0, 1e6]), torch.tensor([0.0, uniform, uniform], dtype=torch.float64))
        assert found[0] == logits[0].argmax()
        assert set(found.tolist()) <= set(allowed)
    logits[1, 698 if banned.start else 699] = torch.inf
    assert draw(logits, torch.ones(3), torch.full((3,), 0.5).double())[1] == logits[1].argmax()


@torch.inference_mode()
def test_a_batch_gets_the_same_tokens_either_way(draw: PlainDraw) -> None:
    rows = [row(SamplingParams(temperature=0.3 * (at % 4)), seed=at, position=at) for at in range(40)]
    logits = normal(40, VOCABULARY)
    assert (
        Sampler(draw)(logits, build_batch(rows)).token_ids.tolist()
        == Sampler()(logits, build_batch(rows)).token_ids.tolist()
    )


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}, {"presence_penalty": 1}, {"logit_bias": {3: 1}}],
)
def test_other_wishes_are_not_for_it(params: dict[str, object]) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise AssertionError("drawn without what the row asks for")

    wanted = row(SamplingParams(**params))  # type: ignore[arg-type]
    assert len(Sampler(refuses)(normal(2, VOCABULARY), build_batch([row(SamplingParams()), wanted])).token_ids) == 2
