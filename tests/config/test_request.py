"""SamplingParams: what it accepts, how it normalises, and an error naming the field for everything else."""

from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import Completion, RequestError, RequestMetrics, RequestOutput, SamplingParams, shown

INT32 = 2**31 - 1
NUMBERS = {  # field: (lowest, highest, whether the lowest itself is refused)
    "temperature": (0.0, 100.0, False),
    "min_p": (0.0, 1.0, False),
    "top_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 100.0, True),
}
INTEGERS = {
    "top_k": (-1, INT32),
    "min_tokens": (0, INT32),
    "max_tokens": (1, INT32),
    "n": (1, 128),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


def make(name, value) -> SamplingParams:
    unbounded = {"max_tokens": None} if name == "min_tokens" else {}
    return SamplingParams(**unbounded, **{name: value})


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    return error.value


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_between_their_limits(name):
    low, high, open_below = NUMBERS[name]
    for value in (high, int(high), (low + high) / 2, *([] if open_below else [low, int(low)])):
        assert getattr(make(name, value), name) == value
    wrong = (low - 0.01, high + 0.01, math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1.0])
    for value in (*wrong, *([low] if open_below else [])):
        error = refusal(**{name: value})
        assert error.param == name and name in str(error)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_between_their_limits(name):
    low, high = INTEGERS[name]
    for value in (low, high, *([None] if name in OPTIONAL else [])):
        assert getattr(make(name, value), name) == value
    for value in (low - 1, high + 1, 1.0, "1", True, *([] if name in OPTIONAL else [None])):
        with pytest.raises(RequestError) as error:
            make(name, value)
        assert error.value.param == name and str(error.value).endswith(f"got {shown(value)}")


def test_messages_name_what_was_given_and_what_is_allowed():
    assert str(refusal(temperature=-1)) == "temperature must be a number from 0 to 100, got -1"
    assert str(refusal(n=129)) == "n must be an integer from 1 to 128, got 129"
    top_p = "top_p must be a number greater than 0 (at least 1e-30) and at most 1, got "
    for value, said in ((0.0, "0"), (1.5, "1.5"), (-1, "-1"), (1e-31, "1e-31"), (1.0000001, "1.0000001")):
        assert str(refusal(top_p=value)) == top_p + said
    ids = "token ids, which are integers of at least 0 and below the vocabulary's size, got"
    assert str(refusal(stop_token_ids=[1, -1])) == f"stop_token_ids takes {ids} -1"
    assert str(refusal(logit_bias={2**31: 1.0})) == f"logit_bias takes as keys {ids} 2147483648"
    assert str(refusal(logit_bias={7: "a"})) == "logit_bias takes numbers from -100 to 100, got 'a' for the token 7"
    assert str(refusal(stop=["a", "", "b"])) == "stop takes non-empty strings, got ''"
    assert "min_tokens (9) must not exceed max_tokens (8)" in str(refusal(min_tokens=9, max_tokens=8))
    assert "speculative: false for none; send one" in str(refusal(fixed_drafts=True, speculative=False))


@pytest.mark.parametrize("value,said", [
    (None, "null"),
    (True, "true"),
    (1.0, "1.0"),
    ("a'b", '"a\'b"'),
    ([], "[]"),
    (["a", None], "['a', null]"),
    ([1] * 5, "a list with 5 items"),
    ([[1]], "a list with 1 item"),
    ({}, "an empty object"),
    ({"a": 1}, "an object with 1 field"),
    ({"a": 1, "b": 2}, "an object with 2 fields"),
])  # fmt: skip
def test_what_was_given_is_shown_in_jsons_words(value, said):
    assert shown(value) == said
    assert all(len(shown(large)) < 400 for large in ("x" * 10**6, 10**4000, ["x" * 10**6] * 4, {"x" * 10**6: value}))


def test_min_tokens_may_equal_max_tokens_or_stand_alone():
    SamplingParams(min_tokens=8, max_tokens=8)
    SamplingParams(min_tokens=500, max_tokens=None)


def test_stop_strings():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    for stop in ("", [""], ["a", 3], [None]):
        error = refusal(stop=stop)
        assert error.param == "stop" and "non-empty strings" in str(error)
    SamplingParams(stop=["x" * 256] * 64)
    for stop, found in ((["ab"] * 65, "got 65, the longest of 2"), ("x" * 257, "got 1, the longest of 257")):
        error = refusal(stop=stop)
        assert error.param == "stop" and "at most 64 strings of at most 256 characters" in str(error)
        assert str(error).endswith(found)


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_what_the_device_would_take_for_zero_is_refused(name):
    for value in (0.0, 1e-46, 1e-39, 9e-31):
        error = refusal(**{name: value})
        assert error.param == name and "greater than 0 (at least 1e-30)" in str(error)
    assert getattr(SamplingParams(**{name: 1e-30}), name) == 1e-30


def test_stop_token_ids():
    assert SamplingParams(stop_token_ids=[3, 0, INT32]).stop_token_ids == (3, 0, INT32)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    for ids in ([-1], [2**31], [1.0], ["3"], [True]):
        assert refusal(stop_token_ids=ids).param == "stop_token_ids"


def test_logit_bias():
    assert SamplingParams(logit_bias=None).logit_bias == {}
    assert SamplingParams(logit_bias={5: -100, 6: 100.0}).logit_bias == {5: -100, 6: 100.0}
    SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0))
    for bias in ({-1: 1.0}, {"5": 1.0}, {5: 100.5}, {5: math.nan}, {5: 10**400}, {5: "x"}, {5: None}):
        assert refusal(logit_bias=bias).param == "logit_bias"
    error = refusal(logit_bias=dict.fromkeys(range(301), 1.0))
    assert error.param == "logit_bias" and "301" in str(error) and "300" in str(error)


def test_callers_containers_are_copied():
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 9.0
    assert (params.stop, params.logit_bias) == (("a",), {1: 1.0})


def test_params_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(name=st.sampled_from([*NUMBERS, *INTEGERS]), value=ANYTHING)
def test_any_value_is_either_kept_or_refused_by_name(name, value):
    try:
        params = make(name, value)
    except RequestError as error:
        assert error.param == name
    else:
        assert getattr(params, name) is value


def test_accept_length_counts_tokens_per_verify_round():
    assert RequestMetrics().accept_length == 0.0
    assert RequestMetrics(verify_rounds=4, verified_tokens=10).accept_length == 2.5


def test_an_output_shows_its_first_completion():
    first = Completion(index=0, text="hi", token_ids=[1, 2], finish_reason="stop")
    out = RequestOutput("r", "p", [9], [first, Completion(index=1, text="ho")], RequestMetrics())
    assert (out.text, out.token_ids, out.finish_reason, out.logprobs) == ("hi", [1, 2], "stop", None)


@pytest.mark.parametrize("name,value", [
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop_token_ids", 3),
    ("logit_bias", 5),
    ("logit_bias", [1, 2]),
    ("ignore_eos", 3),
    ("speculative", "no"),
    ("fixed_drafts", 1),
    ("skip_special_tokens", 0),
    ("include_stop_str_in_output", "yes"),
])  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numbers_of_numpy_and_jax_are_pythons():
    given = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "seed": jnp.int32(7), "ignore_eos": np.True_}
    params = SamplingParams(**given, stop_token_ids=np.array([4, 5]), logit_bias={np.int32(6): np.float64(1)})
    assert params == SamplingParams(
        temperature=0.5, max_tokens=3, seed=7, ignore_eos=True, stop_token_ids=(4, 5), logit_bias={6: 1.0}
    )
    whole = params.max_tokens, params.seed, *params.stop_token_ids, *params.logit_bias
    assert all(type(each) is int for each in whole)
    with pytest.raises(RequestError, match=r"temperature must be a number from 0 to 100, got \[0.5\]"):
        SamplingParams(temperature=np.array([0.5]))
    config = EngineConfig(model=Path("m"), max_running_requests=np.int64(4))
    assert (config.model, type(config.max_running_requests)) == ("m", int)
