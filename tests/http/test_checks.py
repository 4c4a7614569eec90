from __future__ import annotations

from typing import Any

import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.checks import (
    TokenLimit,
    check_chat,
    check_completion,
    check_model,
    checked_params,
)
from trioengine.http.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from trioengine.protocol import ModelInfo
from trioengine.sampling_params import MAX_SEED, MIN_SEED, SamplingParams

INFO = ModelInfo("m", "sim", True, max_model_len=100, vocab_size=1000, eos_token_ids=(0,))
INF, NAN = float("inf"), float("nan")


def check(
    body: GenerationRequest, *, max_sequences: int = 1024, num_prompts: int = 1
) -> SamplingParams:
    if isinstance(body, CompletionRequest):
        limit = TokenLimit(body.max_tokens, 16, "max_tokens", "prompt")
        check_completion(body)
    else:
        limit = TokenLimit(body.max_tokens, None, "max_tokens", "messages")
    if isinstance(body, ChatCompletionRequest):
        check_chat(body)
    return checked_params(body, limit, INFO, max_sequences=max_sequences, num_prompts=num_prompts)


def refusal(body: GenerationRequest, **kwargs: int) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check(body, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 1.0, 2.0], [-0.1, 2.1, INF, NAN]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -1.0, 1.1, NAN]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31, 10**40]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
        ("seed", [0, MIN_SEED, MAX_SEED], [MIN_SEED - 1, MAX_SEED + 1]),
        ("n", [1, 128], [0, -1, 129, 10**40]),
        ("best_of", [1, 128], [0, -1, 129, 10**40]),
        ("max_tokens", [1, 10**40], [0, -1]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("stop", ["a", "x" * 256, ["a", "b", "c", "d"], []], ["", "x" * 257, ["a"] * 5, ["a", ""]]),
        ("stop_token_ids", [[], [0, 999], [1] * 128], [[-1], [1000], [1] * 129, [10**40]]),
        ("priority", [-5, 0, 2**31 - 1], [2**31, -(2**31), 10**40]),
        ("timeout", [0.001, 3600.0], [0.0, -1.0, INF, NAN]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, NAN, INF]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1, NAN, -INF]),
        ("repetition_penalty", [0.01, 1.0, 2.0], [0.0, -1.0, 2.1, NAN]),
        ("logit_bias", [{}, {0: -100.0, 999: 100.0}, dict.fromkeys(range(1000), 1.0)],
         [{0: 100.1}, {0: NAN}, {1000: 1.0}, {-1: 1.0}, {10**40: 1.0}]),
        ("logprobs", [0, 20], [-1, 21, 10**40]),
        ("prompt_logprobs", [0, 20], [-1, 21, 10**40]),
        ("allowed_token_ids", [[0], [999, 1], [7] * 1000],
         [[], [-1], [1000], [10**40], [7] * 1001]),
        ("bad_words", [[], ["a"] * 128, ["x" * 256]], [["a"] * 129, ["x" * 257], [""], [" \n"]]),
        ("truncate_prompt_tokens", [-1, 1, 100], [-2, 0, 101, 10**40]),
    ],
)  # fmt: skip
def test_bounds(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(CompletionRequest(**{name: value}))
    for value in bad:
        assert refusal(CompletionRequest(**{name: value})).param == name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3.5}, ["temperature", "3.5", "[0, 2]"]),
        ({"presence_penalty": -3.0}, ["presence_penalty", "-3", "[-2, 2]"]),
        ({"logit_bias": {1: 101.0}}, ["logit_bias", "101", "[-100, 100]"]),
        ({"logit_bias": {1234: 1.0}}, ["logit_bias", "1234", "[0, 1000)"]),
        ({"logprobs": 21}, ["logprobs", "21", "[0, 20]"]),
        ({"best_of": 2, "n": 3}, ["best_of", "2", "[3, 128]"]),
        ({"truncate_prompt_tokens": 101}, ["truncate_prompt_tokens", "101", "[1, 100]"]),
        ({"stop": ["a"] * 5}, ["stop", "5", "4"]),
        ({"bad_words": ["a"] * 129}, ["bad_words", "129", "128"]),
    ],
)
def test_a_refusal_names_parameter_value_and_range(fields: Any, words: list[str]) -> None:
    message = refusal(CompletionRequest(**fields)).message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_a_chat_cannot_ask_for(fields: dict[str, Any], param: str) -> None:
    assert refusal(ChatCompletionRequest(messages=[], **fields)).param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
     ({"logprobs": True, "top_logprobs": 5}, 5), ({"top_logprobs": 0}, None)],
)  # fmt: skip
def test_logprobs_of_a_chat(fields: dict[str, Any], expected: int | None) -> None:
    assert check(ChatCompletionRequest(messages=[], **fields)).logprobs == expected


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 3}, 3, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 3, 5),
        ({"prompt_logprobs": 0}, None, 0),
        ({"echo": True}, None, None),
        ({"echo": True, "max_tokens": 0}, None, 0),  # the engine has something to do
        ({"best_of": 3}, 0, None),  # to rank them
        ({"best_of": 3, "n": 3}, None, None),
    ],
)
def test_logprobs_that_the_engine_is_asked_for(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    params = check(CompletionRequest(**fields))
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_no_output_is_for_scoring_only() -> None:
    assert refusal(CompletionRequest(max_tokens=0)).param == "max_tokens"
    assert check(CompletionRequest(max_tokens=0, echo=True)).max_tokens == 0


def test_the_best_of_more_are_known_too_late_for_a_stream() -> None:
    assert refusal(CompletionRequest(best_of=3, n=2, stream=True)).param == "best_of"
    assert check(CompletionRequest(best_of=3, n=3, stream=True)).n == 3


def test_a_request_that_no_queue_could_hold_is_refused_for_good() -> None:
    body = CompletionRequest(n=10)
    check(body, max_sequences=1000, num_prompts=100)
    assert refusal(body, max_sequences=999, num_prompts=100).param == "n"
    body = CompletionRequest(best_of=10)
    assert refusal(body, max_sequences=999, num_prompts=100).param == "n"


def test_a_list_that_every_sequence_carries_is_bounded_for_all() -> None:
    body = CompletionRequest(allowed_token_ids=list(range(1000)))
    check(body, num_prompts=524)
    assert refusal(body, num_prompts=525).param == "allowed_token_ids"


def test_stream_options_need_a_stream() -> None:
    options = StreamOptions()
    assert refusal(CompletionRequest(stream_options=options)).param == "stream_options"
    check(CompletionRequest(stream=True, stream_options=options))


def test_a_stream_option_that_cannot_be_honoured() -> None:
    body = CompletionRequest(stream=True, stream_options=StreamOptions(include_obfuscation=True))
    assert refusal(body).param == "stream_options.include_obfuscation"


def test_model_names() -> None:
    assert check_model(None, ("a", "b")) == "a"
    assert check_model("b", ("a", "b")) == "b"
    with pytest.raises(InvalidRequestError) as caught:
        check_model("nope", ("a", "b"))
    assert (caught.value.http_status, caught.value.code) == (404, "model_not_found")
    assert caught.value.param == "model"
