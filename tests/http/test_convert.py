from __future__ import annotations

from typing import Any

import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.convert import Job, TokenLimit, check_common, check_model, make_job
from trioengine.http.schemas import CompletionRequest, StreamOptions
from trioengine.protocol import ModelInfo
from trioengine.sampling_params import MAX_SEED, MIN_SEED

INFO = ModelInfo("m", "sim", True, max_model_len=100, vocab_size=1000, eos_token_ids=(0,))


def limit(requested: int | None = None, default: int | None = 16) -> TokenLimit:
    return TokenLimit(requested, default, "max_tokens", "prompt")


def made(prompt_tokens: int = 3, tokens: TokenLimit | None = None, **fields: Any) -> Job:
    body = CompletionRequest(**fields)
    return make_job(body, [[1] * prompt_tokens], tokens or limit(), INFO, "m")


def refusal(**fields: Any) -> InvalidRequestError:
    try:
        check_common(CompletionRequest(**fields), max_sequences=1024, num_prompts=1)
        made(**fields)
    except InvalidRequestError as error:
        return error
    raise AssertionError("nothing was refused")


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 1.0, 2.0], [-0.1, 2.1, INF, NAN]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -1.0, 1.1, NAN]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31, 10**40]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
        ("seed", [0, MIN_SEED, MAX_SEED], [MIN_SEED - 1, MAX_SEED + 1]),
        ("n", [1, 128], [0, -1, 129, 10**40]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("stop", ["a", "x" * 256, ["a", "b", "c", "d"], []], ["", "x" * 257, ["a"] * 5, ["a", ""]]),
        ("stop_token_ids", [[], [0, 999], [1] * 128], [[-1], [1000], [1] * 129, [10**40]]),
        ("priority", [-5, 0, 2**31 - 1], [2**31, -(2**31), 10**40]),
        ("timeout", [0.001, 3600.0], [0.0, -1.0, INF, NAN]),
    ],
)
def test_bounds(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        body = CompletionRequest(**{name: value})
        check_common(body, max_sequences=1024, num_prompts=1)
        made(**{name: value})
    for value in bad:
        assert refusal(**{name: value}).param == name


def test_values_reach_the_engine() -> None:
    job = made(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, stop="x", stop_token_ids=[5],
        ignore_eos=True, min_tokens=2, priority=3, timeout=9.0, stream=True,
        stream_options=StreamOptions(include_usage=True),
    )  # fmt: skip
    params = job.sequences[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (7, ("x",), (5,))
    assert (params.ignore_eos, params.min_tokens, params.n) == (True, 2, 1)
    assert (job.priority, job.timeout_s, job.stream, job.include_usage) == (3, 9.0, True, True)


@pytest.mark.parametrize(
    ("prompt_tokens", "tokens", "expected"),
    [
        (99, limit(requested=1), 1),
        (60, limit(requested=40), 40),
        (99, limit(), 1),  # the default of 16 was not asked for, so it gives way
        (3, limit(), 16),
        (3, limit(default=None), 97),
        (99, limit(default=None), 1),
    ],
)
def test_output_tokens(prompt_tokens: int, tokens: TokenLimit, expected: int) -> None:
    assert made(prompt_tokens, tokens).sequences[0].params.max_tokens == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "tokens", "numbers"),
    [
        (100, limit(requested=1), ("100", "100", "1")),
        (100, limit(), ("100", "100", "1")),
        (101, limit(default=None), ("100", "101", "1")),
        (60, limit(requested=41), ("100", "60", "41")),
        (1, limit(requested=10**30), ("100", "1", str(10**30))),
    ],
)
def test_what_does_not_fit_is_refused_with_three_numbers(
    prompt_tokens: int, tokens: TokenLimit, numbers: tuple[str, str, str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(prompt_tokens, tokens)
    assert caught.value.code == "context_length_exceeded"
    for number in numbers:
        assert f" {number} " in caught.value.message


@pytest.mark.parametrize("requested", [0, -5])
def test_output_tokens_must_be_positive_and_are_called_what_the_client_called_them(
    requested: int,
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(3, TokenLimit(requested, None, "max_completion_tokens", "messages"))
    assert (caught.value.param, caught.value.code) == ("max_completion_tokens", "invalid_value")


def test_index_is_prompt_times_n_plus_k_and_each_has_a_seed_of_its_own() -> None:
    job = make_job(CompletionRequest(n=3, seed=MAX_SEED), [[1], [2, 2]], limit(), INFO, "m")
    assert [s.prompt_token_ids for s in job.sequences] == [[1]] * 3 + [[2, 2]] * 3
    seeds = [s.params.seed for s in job.sequences]
    assert seeds == [MAX_SEED, MIN_SEED, MIN_SEED + 1] * 2
    assert all(s.params.n == 1 for s in job.sequences)
    assert (job.n, job.prompt_tokens) == (3, 3)


def test_without_a_seed_none_is_made_up() -> None:
    assert [s.params.seed for s in made(n=2).sequences] == [None, None]


def test_a_request_that_no_queue_could_hold_is_refused_for_good() -> None:
    body = CompletionRequest(n=10)
    check_common(body, max_sequences=1000, num_prompts=100)
    with pytest.raises(InvalidRequestError) as caught:
        check_common(body, max_sequences=999, num_prompts=100)
    assert caught.value.param == "n"


def test_stream_options_need_a_stream() -> None:
    assert refusal(stream_options=StreamOptions()).param == "stream_options"
    check_common(
        CompletionRequest(stream=True, stream_options=StreamOptions()),
        max_sequences=1,
        num_prompts=1,
    )


@pytest.mark.parametrize("name", ["continuous_usage_stats", "include_obfuscation"])
def test_stream_options_that_cannot_be_honoured(name: str) -> None:
    options = StreamOptions(**{name: True})
    assert refusal(stream=True, stream_options=options).param == f"stream_options.{name}"


def test_model_names() -> None:
    assert check_model(None, ("a", "b")) == "a"
    assert check_model("b", ("a", "b")) == "b"
    with pytest.raises(InvalidRequestError) as caught:
        check_model("nope", ("a", "b"))
    assert (caught.value.http_status, caught.value.code) == (404, "model_not_found")
    assert caught.value.param == "model"
