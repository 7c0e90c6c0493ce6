"""A wrong answer is told by what it is the right answer to."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.device import CPU
from octavo.conformance.registry import trials
from octavo.conformance.stage import Stage, Step
from tests.conformance.faults import FAULTS, Narrow


def played(case: str = "two-steps") -> tuple[Stage, Step, list[Tensor]]:
    """A step of three rows and its right answers, a tensor for each layer."""
    stage = trials(Narrow, CPU(), case)[0].stage()
    step = stage.step([(stage.row(20), 1), (stage.row(0), 6), (stage.row(9), 4)])
    stage.write(step)
    return stage, step, stage.attend(step, stage.backend.plan(step.batch))


def told(change: Any) -> str:
    """What is said of layer 1, whose right answer [tokens, heads, head_size] is changed."""
    stage, step, answers = played()
    answers[1] = change(answers[1])
    with pytest.raises(AssertionError) as raised:
        stage.check(step, answers)
    return str(raised.value)


def test_what_is_right_is_not_told() -> None:
    stage, step, answers = played()
    stage.check(step, answers)


@settings(deadline=None, max_examples=20)
@given(st.floats(1.1, 50) | st.floats(-50, -0.1) | st.floats(0.01, 0.9))
def test_a_multiple(factor: float) -> None:
    sentence = told(lambda answer: answer * factor)
    assert sentence.startswith("layer 1, row 0 (1 new of 21 tokens): error ")
    assert f"correlation {1.0 if factor > 0 else -1.0:.6f} " in sentence
    assert sentence.endswith(f": scaled by {factor:.3g}")


@settings(deadline=None, max_examples=10)
@given(st.permutations(range(4)).filter(lambda order: order != [0, 1, 2, 3]))
def test_heads_in_another_order(order: list[int]) -> None:
    listed = ", ".join(map(str, order))
    assert f"shuffled: its heads are those of the truth in the order {listed}" in told(lambda answer: answer[:, order])


def test_elements_in_another_order() -> None:
    interleaved = told(lambda answer: answer.unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2))
    assert interleaved.endswith("shuffled: its elements are the truth's in another order")


def test_tokens_in_another_order() -> None:
    sentence = told(lambda answer: answer[[0, 6, 5, 4, 3, 2, 1, 7, 8, 9, 10]])
    assert sentence.endswith("row 1 (6 new of 6 tokens): " + sentence.split("tokens): ")[1])
    assert sentence.endswith("shuffled: it answers tokens 6, 5, 4, 3, 2, 1 of the step")


def test_what_is_nearly_right() -> None:
    assert told(lambda answer: answer.bfloat16().to(answer.dtype)).endswith(": right, but too coarse")
    assert "too coarse" not in told(lambda answer: answer + 0.01 * torch.randn_like(answer))


def test_noise_is_like_nothing_known() -> None:
    assert told(torch.randn_like).endswith("(limit 0.999999999)")


@pytest.mark.parametrize(
    ("fault", "case", "known"),
    [
        ("soft cap dropped", "features", "it is attention without the soft cap"),
        ("window declared and ignored", "features", "it is attention without the window"),
        ("window one too wide", "features", "it is attention with a window of 2"),
        ("sinks dropped", "features", "it is attention without the sinks"),
        ("ALiBi slopes dropped", "features", "it is attention without ALiBi"),
        ("ALiBi favours distant keys", "features", "ALiBi favours distant keys"),
        ("scale dropped", "decode", "it is attention with scale 1"),
        ("scale assumed to be head_size ** -0.5", "decode", "it is attention with scale head_size ** -0.5"),
        ("prefix ignored in prefill", "resumed-prefill", "it is attention to this step's keys alone"),
        ("causal mask from the top left", "resumed-prefill", "its causal mask begins at the top left"),
        ("wrong head group", "decode", "query head h meets key head h mod kv_heads"),
    ],
)
def test_a_known_fault_is_named(fault: str, case: str, known: str) -> None:
    assert FAULTS[fault][1] & {case}
    reasons = (trial.run().reason for trial in trials(FAULTS[fault][0], CPU(), case))
    assert next(reason for reason in reasons if reason).endswith(f": {known}")
