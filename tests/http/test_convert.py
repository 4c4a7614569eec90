from __future__ import annotations

from typing import Any

import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.checks import TokenLimit, checked_params
from trioengine.http.convert import Job, bad_word_ids, make_job
from trioengine.http.schemas import CompletionRequest, StreamOptions
from trioengine.protocol import ModelInfo
from trioengine.sampling_params import MAX_SEED, MIN_SEED

INFO = ModelInfo("m", "sim", True, max_model_len=100, vocab_size=1000, eos_token_ids=(0,))


def limit(requested: int | None = None, default: int | None = 16) -> TokenLimit:
    return TokenLimit(requested, default, "max_tokens", "prompt")


def made(
    prompt_tokens: int = 3,
    tokens: TokenLimit | None = None,
    prompts: list[list[int]] | None = None,
    **fields: Any,
) -> Job:
    body, tokens = CompletionRequest(**fields), tokens or limit()
    prompts = prompts or [[1] * prompt_tokens]
    params = checked_params(body, tokens, INFO, max_sequences=1024, num_prompts=len(prompts))
    return make_job(body, params, prompts, tokens, INFO, "m")


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
    assert caught.value.message.startswith("max_completion_tokens must be")


def test_fewest_and_most_tokens_are_called_what_the_client_called_them() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(3, TokenLimit(2, None, "max_completion_tokens", "messages"), min_tokens=3)
    assert caught.value.param == "min_tokens"
    assert caught.value.message == "min_tokens (3) must not exceed max_completion_tokens (2)"


def test_index_is_prompt_times_n_plus_k_and_each_has_a_seed_of_its_own() -> None:
    job = made(n=3, seed=MAX_SEED, prompts=[[1], [2, 2]])
    assert [s.prompt_token_ids for s in job.sequences] == [[1]] * 3 + [[2, 2]] * 3
    seeds = [s.params.seed for s in job.sequences]
    assert seeds == [MAX_SEED, MIN_SEED, MIN_SEED + 1] * 2
    assert all(s.params.n == 1 for s in job.sequences)
    assert (job.n, job.prompt_tokens) == (3, 3)


def test_without_a_seed_none_is_made_up() -> None:
    assert [s.params.seed for s in made(n=2).sequences] == [None, None]


def test_bad_words_stand_for_themselves_and_for_what_follows_a_space() -> None:
    spellings = {"a": [1], " a": [2], "bc": [3, 4], " bc": [5, 3, 4], "d": [6], " d": [6]}
    assert bad_word_ids(["a", " bc", "d"], spellings.__getitem__) == ((1,), (2,), (3, 4), (6,))


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        bad_word_ids(["\x00"], lambda _: [])
    assert caught.value.param == "bad_words"
