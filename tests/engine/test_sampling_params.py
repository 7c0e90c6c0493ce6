import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.sampling_params import SamplingParams

LARGEST = 2**31 - 1
MOST = 1024
INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, LARGEST),
    "min_tokens": (0, LARGEST),
    "top_k": (0, LARGEST),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MOST),
    "prompt_logprobs": (0, MOST),
    "n": (1, MOST),
    "best_of": (1, MOST),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (math.ulp(0), 1),
    "min_p": (0, 1),
    "typical_p": (math.ulp(0), 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of"}
FLAGS = ("ignore_eos", "include_stop_text", "skip_special_tokens")


def make(field: str, value: Any) -> SamplingParams:
    return SamplingParams(**{field: value})


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    given_values: dict[str, Any] = {}
    for field, (low, high) in INTEGERS.items():
        given_values[field] = draw(st.integers(low, high) | (st.none() if field in OPTIONAL else st.nothing()))
    for field, (lowest, highest) in NUMBERS.items():
        given_values[field] = draw(st.floats(lowest, highest))
    for field in FLAGS:
        given_values[field] = draw(st.booleans())
    words = st.text(min_size=1, max_size=8)
    given_values["stop"] = draw(words | st.lists(words, max_size=4))
    given_values["stop_token_ids"] = draw(st.lists(st.integers(0, LARGEST), max_size=4))
    given_values["logit_bias"] = draw(st.dictionaries(st.integers(0, LARGEST), st.floats(-100, 100), max_size=4))
    if given_values["max_tokens"] is not None:
        given_values["min_tokens"] = min(given_values["min_tokens"], given_values["max_tokens"])
    if given_values["best_of"] is not None:
        given_values["n"] = min(given_values["n"], given_values["best_of"])
    return given_values


@given(valid())
def test_valid_values_are_kept_and_cross_a_process_boundary(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for field in (*INTEGERS, *NUMBERS, *FLAGS, "logit_bias"):
        assert getattr(params, field) == values[field]
    assert params.stop == ((values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"]))
    assert params.stop_token_ids == tuple(values["stop_token_ids"])
    assert params.argmax_only in (True, False)  # what is computed once does not travel
    for codec in (msgspec.msgpack, msgspec.json):
        received = codec.decode(codec.encode(params), type=SamplingParams)
        assert received == params
        assert isinstance(received.stop, tuple)
        assert isinstance(received.stop_token_ids, tuple)


@pytest.mark.parametrize("field", INTEGERS)
def test_whole_numbers_out_of_range_or_of_another_type_are_refused(field: str) -> None:
    low, high = INTEGERS[field]
    for value in (low - 1, high + 1, 1.0, 1.5, math.nan, math.inf, "1", True, [1], Fraction(3, 2)):
        with pytest.raises(ValueError, match=f"^{field}=.* is not allowed: give a whole number from {low} to {high}; "):
            make(field, value)
    if field not in OPTIONAL:
        with pytest.raises(ValueError, match=f"^{field}=None"):
            make(field, None)


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_out_of_range_or_of_another_type_are_refused(field: str) -> None:
    low, high = NUMBERS[field]
    below = 0.0 if low == math.ulp(0) else math.nextafter(low, -math.inf)
    above = math.nextafter(high, math.inf)
    for value in (below, above, 10**400, math.nan, math.inf, -math.inf, "0.5", None, True, 1j, [0.5]):
        with pytest.raises(ValueError, match=f"^{field}=.* is not allowed: give a number .* to {high}; "):
            make(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((flag, value) for flag in FLAGS for value in (1, 0, None, "true")),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", None),
        ("stop", {"a"}),
        ("stop", b"a"),
        ("stop_token_ids", 2),
        ("stop_token_ids", "2"),
        ("stop_token_ids", None),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", None),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}=.* is not allowed: give "):
        make(field, value)


def test_what_is_inside_a_mapping_or_list_is_named() -> None:
    with pytest.raises(ValueError, match=r"^logit_bias\[5\]=nan is not allowed: give a number from -100 to 100"):
        SamplingParams(logit_bias={5: math.nan})
    with pytest.raises(ValueError, match=r"^the token id in logit_bias='5'"):
        make("logit_bias", {"5": 1.0})
    with pytest.raises(ValueError, match=r"^the token id in stop_token_ids=-1"):
        SamplingParams(stop_token_ids=[-1])


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="best_of=2 is less than n=3"):
        SamplingParams(n=3, best_of=2)


def test_numpy_scalars_become_numbers_of_python() -> None:
    params = SamplingParams(temperature=np.float32(0.5), logit_bias={np.int64(3): np.float32(1)})  # type: ignore[arg-type, dict-item]
    assert make("top_k", np.int32(4)).top_k == 4
    assert type(params.temperature) is float
    assert [*map(type, params.logit_bias)] == [int]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_params_cannot_be_changed_and_unknown_fields_are_refused() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError, match="beam_width"):
        make("beam_width", 2)
    with pytest.raises(msgspec.ValidationError, match="beam_width"):
        msgspec.json.decode(b'{"beam_width": 2}', type=SamplingParams)


def test_a_changed_copy_is_checked_and_knows_itself_anew() -> None:
    greedy = SamplingParams(temperature=0)
    assert greedy.argmax_only
    assert not msgspec.structs.replace(greedy, temperature=0.5).argmax_only
    with pytest.raises(ValueError, match="temperature=-1"):
        msgspec.structs.replace(greedy, temperature=-1)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0.1},
        {"logprobs": 0},
        {"best_of": 2},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
    ],
)
def test_the_argmax_is_enough_only_without_extras(extra: dict[str, Any]) -> None:
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5, n=2).argmax_only
    assert not SamplingParams(**{"temperature": 0, **extra}).argmax_only


def test_the_number_of_sequences_is_best_of_or_n() -> None:
    assert SamplingParams(n=3).sequences == 3
    assert SamplingParams(n=3, best_of=5).sequences == 5
