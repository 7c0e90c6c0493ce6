"""The truth that backends are compared with, compared with transformers' own attention and with sums by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from octavo.attention.contract import AttentionSpec
from octavo.conformance.truth import Deviation, Fault, attention, deviation, judge


def make_spec(**given: Any) -> AttentionSpec:
    values = {"layers": 1, "heads": 6, "kv_heads": 2, "head_size": 8, "scale": 0.3} | given
    return AttentionSpec(dtype=torch.float32, kv_dtype=torch.float32, **values)


def tokens(count: int, heads: int) -> Tensor:
    return torch.randn(count, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(count + heads))


def module(sinks: Tensor | None = None) -> Any:
    """What transformers' attention functions ask of their layer."""
    return SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)


def batched(tensor: Tensor) -> Tensor:
    """[tokens, heads, size] -> [1, heads, tokens, size]."""
    return tensor.transpose(0, 1)[None]


def transformers_mask(new: int, context: int, window: int | None) -> Tensor:
    """[1, 1, new, context], 0 where a query sees a key; written element by element."""
    mask = torch.full((1, 1, new, context), -torch.inf, dtype=torch.float64)
    for query in range(new):
        position = context - new + query
        for key in range(context):
            if key <= position and (window is None or position - key < window):
                mask[0, 0, query, key] = 0
    return mask


@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 9), (7, 7), (4, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_like_gemma2(new: int, context: int, window: int | None, softcap: float | None) -> None:
    query, keys, values = tokens(new, 6), tokens(context, 2), tokens(context + 1, 2)[1:]
    mask = transformers_mask(new, context, window)
    # Its softmax is float32.
    expected = gemma2(module(), batched(query), batched(keys), batched(values), mask, scaling=0.3, softcap=softcap)[0][
        0
    ]
    answer = attention(query, keys, values, None, spec=make_spec(window=window, softcap=softcap))
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("new", "context"), [(1, 9), (7, 7), (4, 9)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 0.7)])
def test_biases_like_blooms(new: int, context: int, window: int | None, softcap: float | None) -> None:
    """Its own count from the first key, which is the same to a softmax; they are added as a mask is."""
    query, keys, values = tokens(new, 6), tokens(context, 2), tokens(context + 1, 2)[1:]
    biases = build_alibi_tensor(torch.ones(1, context), 6, torch.float64).view(1, 6, 1, context)
    mask = transformers_mask(new, context, window) + biases
    expected = gemma2(module(), batched(query), batched(keys), batched(values), mask, scaling=0.3, softcap=softcap)[0]
    slopes = tuple(biases[0, :, 0, 1].tolist())
    answer = attention(query, keys, values, None, spec=make_spec(window=window, softcap=softcap, alibi_slopes=slopes))
    torch.testing.assert_close(answer, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_like_gpt_oss(window: int | None) -> None:
    query, keys, values = tokens(4, 6), tokens(9, 2), tokens(10, 2)[1:]
    sinks = torch.linspace(-1, 2, 6, dtype=torch.float64)
    mask = transformers_mask(4, 9, window)
    expected = gpt_oss(module(sinks), batched(query), batched(keys), batched(values), mask, scaling=0.3)[0][0]
    answer = attention(query, keys, values, sinks, spec=make_spec(window=window, sinks=True))
    torch.testing.assert_close(answer, expected)


def test_zero_query_is_the_mean_of_what_is_visible() -> None:
    values = tokens(5, 2)
    answer = attention(torch.zeros(2, 6, 8), tokens(5, 2), values, None, spec=make_spec(window=3))
    for query, visible in enumerate((slice(1, 4), slice(2, 5))):
        torch.testing.assert_close(answer[query], values[visible].mean(0).repeat_interleave(3, dim=0))


def test_deviation_is_of_the_worst_token_and_head() -> None:
    truth = tokens(4, 6)
    answer = truth.clone()
    answer[2] *= 1.01
    answer[3, 5] *= -1
    found = deviation(answer, truth)
    assert found.correlation == pytest.approx(-1)
    assert found.error == pytest.approx(float(2 * truth[3, 5].norm() / truth[3].norm()))
    assert deviation(answer[:3], truth[:3]).error == pytest.approx(0.01)
    assert deviation(answer[:2], truth[:2]).error == 0
    assert deviation(truth * torch.tensor([1.0, torch.nan]).repeat(4), truth).error == torch.inf


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (Deviation(1e-3, 1 - 1e-5), True),
        (Deviation(3e-3, 1.0), False),
        (Deviation(1e-3, 1 - 1e-3), False),
        (Deviation(torch.inf, -1.0), False),
    ],
)
def test_both_error_and_correlation_are_judged(found: Deviation, passes: bool) -> None:
    if passes:
        judge(found, Deviation(2e-3, 1 - 1e-4), "row 7")
    else:
        with pytest.raises(Fault, match="row 7"):
            judge(found, Deviation(2e-3, 1 - 1e-4), "row 7")
