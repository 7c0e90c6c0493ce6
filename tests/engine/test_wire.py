"""What crosses the boundary arrives as it was."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from octavo.engine import messages
from octavo.engine.output import Output
from octavo.engine.request import FinishReason
from octavo.engine.sampled import TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.engine.wire import fingerprint, pack, prompt_bytes, prompt_tokens, unpack
from octavo.hooks import StepStats

STEP = StepStats(
    seconds=0.5, prefill_tokens=1, decode_tokens=2, running=3, waiting=4, preempted=5, free_blocks=6, cached_blocks=7,
    held_blocks=8,
)  # fmt: skip
LOGPROBS = st.floats(max_value=0, width=32)
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def prompts(draw: st.DrawFn) -> TokenLogprobs:
    tokens, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    values = np.array(draw(st.lists(LOGPROBS, min_size=tokens, max_size=tokens)), np.float32)
    ids = np.arange(tokens * width).reshape(tokens, width)
    return TokenLogprobs(values, ids, ids.astype(np.float32))


@st.composite
def some_outputs(draw: st.DrawFn) -> Output:
    """As an engine makes them: the likeliest tokens come with a log-probability, an error with an end."""
    logprob, reason = draw(st.none() | LOGPROBS), draw(st.none() | st.sampled_from(FinishReason))
    return Output(
        request_id=draw(st.integers(0, 2**40)),
        token_id=draw(st.none() | TOKENS),
        logprob=logprob,
        top=[] if logprob is None else draw(st.lists(st.tuples(TOKENS, LOGPROBS), max_size=3)),
        prompt=draw(st.none() | prompts()),
        finish_reason=reason,
        error=draw(st.none() | st.text()) if reason is FinishReason.ERROR else None,
        cached_tokens=draw(TOKENS),
        queue_seconds=draw(st.floats(0, 1e6)),
    )


@settings(deadline=None)
@given(st.lists(some_outputs(), max_size=5))
def test_outputs(sent: list[Output]) -> None:
    message = messages.decode_from_engine(messages.encode(pack(STEP, sent)))
    assert isinstance(message, messages.Outputs)
    assert message.step == STEP
    for one, other in zip(unpack(message), sent, strict=True):
        assert replace(one, prompt=None) == replace(other, prompt=None)
        assert (one.prompt is None) == (other.prompt is None)
        if one.prompt is not None and other.prompt is not None:
            for found, expected in zip(dataclasses.astuple(one.prompt), dataclasses.astuple(other.prompt), strict=True):
                assert found.dtype == expected.dtype
                assert found.tolist() == expected.reshape(found.shape).tolist()


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_prompts(tokens: list[int]) -> None:
    assert prompt_tokens(prompt_bytes(tokens)).tolist() == tokens


@pytest.mark.parametrize(
    "prompt", [[2**63], [0.5], ["a"], [None], [[1], [1, 2]], [[1, 2]], 1, "text", [True, False], object()]
)
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RequestRefused, match="no list of token ids"):
        prompt_bytes(prompt)  # type: ignore[arg-type]


def test_a_fingerprint_is_of_all_but_the_seed() -> None:
    prompt, params = prompt_bytes([1, 2]), SamplingParams(max_tokens=3, stop=["a"])
    same = fingerprint(prompt, SamplingParams(max_tokens=3, stop="a", seed=7), "t")
    others = [
        fingerprint(prompt_bytes([1, 3]), params, "t"),
        fingerprint(prompt, SamplingParams(max_tokens=4, stop=["a"]), "t"),
        fingerprint(prompt, params, "u"),
    ]
    assert fingerprint(prompt, params, "t") == same
    assert len({same, *others}) == 4
