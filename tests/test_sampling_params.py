"""A ``SamplingParams`` in hand is a valid one, and says nothing on the wire that is default."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from trioengine.errors import InvalidRequestError
from trioengine.sampling_params import SamplingParams

GOOD: list[dict[str, Any]] = [
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 2.0},
    {"logit_bias": {0: -100.0, 7: 100.0}},
    {"logprobs": 0},
    {"prompt_logprobs": 20},
    {"allowed_token_ids": (3,)},
    {"bad_words_token_ids": ((1,), (2, 3))},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"cache_salt": "x" * 256},
    {"include_stop_str_in_output": True, "skip_special_tokens": False},
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": math.nan}),
    ("frequency_penalty", {"frequency_penalty": -math.inf}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 2.01}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("logit_bias", {"logit_bias": {1: 100.5}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {-1: 0.0}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("allowed_token_ids", {"allowed_token_ids": ()}),
    ("allowed_token_ids", {"allowed_token_ids": (2**31,)}),
    ("bad_words", {"bad_words_token_ids": ((),)}),
    ("bad_words", {"bad_words_token_ids": ((1, -1),)}),
    ("bad_words", {"bad_words_token_ids": ((1,) * 257,)}),
    ("bad_words", {"bad_words_token_ids": ((1,),) * 257}),
    ("cache_salt", {"cache_salt": "x" * 257}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1, "prompt_logprobs": 0}),
]


@pytest.mark.parametrize("given", GOOD)
def test_what_is_in_range_survives_the_wire(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params


@pytest.mark.parametrize(("param", "given"), BAD)
def test_what_is_out_of_range_is_refused_by_name(param: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**given)
    assert refused.value.param == param


def test_defaults_take_no_room_on_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


def test_a_default_is_nobodys_to_change() -> None:
    SamplingParams().logit_bias[1] = 1.0
    assert SamplingParams().logit_bias == {}


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("logit_bias", {"logit_bias": {9: 1.0, 10: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": (10, 1)}),
        ("stop_token_ids", {"stop_token_ids": (10,)}),
        ("bad_words", {"bad_words_token_ids": ((1,), (2, 10))}),
    ],
)
def test_a_token_that_the_vocabulary_lacks_is_refused_by_name(
    param: str, given: dict[str, Any]
) -> None:
    params = SamplingParams(**given)
    params.check_token_ids(11)
    with pytest.raises(InvalidRequestError, match="10") as refused:
        params.check_token_ids(10)
    assert refused.value.param == param
