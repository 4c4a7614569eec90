"""Penalties, biases, masks and logprobs, from a request's parameters to what it is told."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from helpers.requests import Spelling
from helpers.sampling_reference import run_core
from helpers.tiny_models import VOCAB
from trioengine.outputs import LEAST_LOGPROB, FinishReason, RequestOutput, TokenLogprob
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.engine_proc.runner import ModelRunner

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 10}
PROMPT: Final = random.Random(3).choices(range(1, VOCAB), k=45)
CLOSE: Final = 2e-4  # torch's rounding may depend on how many rows a step has


def run(runner: ModelRunner, *asked: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Run one request each, of different prompts but the first two, side by side."""
    prompts = [PROMPT, PROMPT, *(PROMPT[: 7 * i + 1][::-1] for i in range(1, len(asked)))]
    requests = {i: (prompts[i], params) for i, params in enumerate(asked)}
    told, _ = run_core(runner, requests, lambda params: Spelling(), **options)
    return [told[i] for i in range(len(asked))]


def only(runner: ModelRunner, **params: Any) -> RequestOutput:
    return run(runner, SamplingParams(**{**GREEDY, **params}))[0]


def pairs(logprobs: Sequence[TokenLogprob | None] | None) -> list[tuple[int, float]]:
    """Return (token, logprob) of all but a first one that is nothing."""
    assert logprobs is not None
    return [(each.token_id, each.logprob) for each in logprobs if each is not None]


def assert_close(got: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in got] == [token for token, _ in expected]
    assert [value for _, value in got] == pytest.approx([v for _, v in expected], abs=CLOSE)


def test_logprobs_come_with_every_token(runner: ModelRunner) -> None:
    output = only(runner, logprobs=5)
    assert output.token_ids == only(runner).token_ids
    assert output.logprobs is not None
    assert [told.token_id for told in output.logprobs] == output.token_ids
    for told in output.logprobs:
        assert told.rank == 1
        assert told.top[0] == (told.token_id, told.logprob)
        values = [value for _, value in told.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert all(LEAST_LOGPROB <= value <= 0.0 for value in values)
        assert sum(map(math.exp, values)) <= 1.0 + 1e-5


def test_nobody_is_told_what_only_a_neighbour_asked_for(runner: ModelRunner) -> None:
    plain, none, some = run(
        runner,
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, logprobs=0),
        SamplingParams(**GREEDY, logprobs=7, presence_penalty=1.0),
    )
    assert plain.logprobs is None
    assert plain.prompt_logprobs is None
    usual = run(runner, SamplingParams(**GREEDY), SamplingParams(**GREEDY))
    assert none.token_ids == usual[1].token_ids
    assert none.logprobs is not None
    assert some.logprobs is not None
    assert {len(told.top) for told in none.logprobs} == {0}
    assert {len(told.top) for told in some.logprobs} == {7}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_decides(runner: ModelRunner, temperature: float) -> None:
    usual = set(only(runner).token_ids)
    forced = only(runner, logit_bias={9: 100.0}, temperature=temperature, seed=1)
    assert set(forced.token_ids) == {9}
    banned = only(runner, logit_bias=dict.fromkeys(usual, -100.0), temperature=temperature, seed=1)
    assert not usual & set(banned.token_ids)


def test_logprobs_are_those_before_biases_and_masks(runner: ModelRunner) -> None:
    plain = only(runner, logprobs=3, max_tokens=1).logprobs
    forced = only(runner, logprobs=3, max_tokens=1, logit_bias={9: 100.0}, allowed_token_ids=(9,))
    assert plain is not None
    assert forced.logprobs is not None
    told = forced.logprobs[0]
    assert told.token_id == 9
    assert_close(told.top, plain[0].top)
    assert told.rank > 1
    assert told.logprob < told.top[0][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_other_token_than_the_allowed_comes(runner: ModelRunner, temperature: float) -> None:
    allowed = tuple(range(1, VOCAB, 7))
    output = only(runner, allowed_token_ids=allowed, temperature=temperature, seed=4)
    assert set(output.token_ids) <= set(allowed)
    assert output.finish_reason is FinishReason.LENGTH


def test_a_bad_word_is_never_completed(runner: ModelRunner) -> None:
    usual = only(runner).token_ids
    word = tuple(usual[3:6])
    output = only(runner, bad_words_token_ids=(word, (0,)))
    assert output.token_ids[:5] == usual[:5]
    assert output.token_ids[5] != usual[5]
    found = [tuple(output.token_ids[i : i + 3]) for i in range(8)]
    assert word not in found


def test_a_word_that_the_prompt_began_is_not_bad(runner: ModelRunner) -> None:
    """As in vLLM: what counts is the output."""
    usual = only(runner).token_ids
    output = only(runner, bad_words_token_ids=((PROMPT[-1], usual[0]),))
    assert output.token_ids == usual


def test_who_may_sample_nothing_ends_alone(runner: ModelRunner) -> None:
    helpless = {"allowed_token_ids": (5, 6), "bad_words_token_ids": ((5,), (6,))}
    asked = [
        SamplingParams(**GREEDY, logprobs=2, presence_penalty=0.5),
        SamplingParams(**{**GREEDY, **helpless}, logprobs=2),
        SamplingParams(**{**GREEDY, **helpless, "temperature": 1.0}, seed=1),
        SamplingParams(**{**GREEDY, "temperature": 1.0}, seed=1, logit_bias={3: 1.0}),
    ]
    outputs = run(runner, *asked)
    for helpless_one in outputs[1:3]:
        assert helpless_one.finish_reason is FinishReason.ERROR
        assert "allowed" in str(helpless_one.error)
        assert (helpless_one.refused, helpless_one.param) == (True, "allowed_token_ids")
        assert helpless_one.token_ids == []
    others = run(runner, asked[0], SamplingParams(**GREEDY), SamplingParams(**GREEDY), asked[3])
    for i in (0, 3):
        assert outputs[i].token_ids == others[i].token_ids
        assert outputs[i].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty", "temperature", "min_p"])
@pytest.mark.parametrize("value", [5e-324, 1e-46, 1e-38, 1e-30])
def test_a_value_below_what_a_float32_holds_is_served(
    runner: ModelRunner, name: str, value: float
) -> None:
    tiny = {**GREEDY, "temperature": 1.0, "seed": 1, name: value}
    outputs = run(runner, SamplingParams(**GREEDY), SamplingParams(**tiny))
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 2
    (usual,) = run(runner, SamplingParams(**GREEDY))
    assert outputs[0].token_ids == usual.token_ids


def test_a_temperature_above_what_a_float32_holds_is_served(runner: ModelRunner) -> None:
    (output,) = run(runner, SamplingParams(**{**GREEDY, "temperature": 1e300}, seed=1))
    assert output.finish_reason is FinishReason.LENGTH


def test_penalties_push_what_has_come_away(runner: ModelRunner) -> None:
    strong = only(runner, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    assert len(set(strong.token_ids)) >= len(set(only(runner).token_ids))
    looped = only(runner, allowed_token_ids=(5, 6), repetition_penalty=1.01, max_tokens=20)
    pushed = only(runner, allowed_token_ids=(5, 6), frequency_penalty=2.0, max_tokens=20)
    assert set(looped.token_ids) <= {5, 6}
    assert set(pushed.token_ids) == {5, 6}


# Prompts ------------------------------------------------------------------------------------------

SCORED: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 3}


def test_a_prompt_is_scored_without_a_token(runner: ModelRunner) -> None:
    output = only(runner, **SCORED)
    assert output.token_ids == []
    assert output.text == ""
    assert output.logprobs is None
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [token for token, _ in pairs(output.prompt_logprobs)] == PROMPT[1:]
    for told in output.prompt_logprobs[1:]:
        assert told is not None
        assert len(told.top) == 3
        assert (told.rank == 1) == (told.top[0][0] == told.token_id)


def test_a_prompt_scores_the_same_whatever_happens_around_it(runner: ModelRunner) -> None:
    expected = pairs(only(runner, **SCORED).prompt_logprobs)
    company = [SamplingParams(**GREEDY), SamplingParams(**{**GREEDY, "temperature": 1.0}, seed=2)]
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3, logprobs=1)
    chunked = run(runner, scored, *company, max_num_seqs=4, max_num_batched_tokens=7)
    assert_close(pairs(chunked[0].prompt_logprobs), expected)
    assert chunked[1].prompt_logprobs is None
    uncached = run(runner, scored, enable_prefix_caching=False)
    assert_close(pairs(uncached[0].prompt_logprobs), expected)


def test_a_prompt_that_is_cached_is_scored_all_the_same(runner: ModelRunner) -> None:
    first = SamplingParams(temperature=0.0, max_tokens=2)
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    outputs = run(runner, first, scored, max_num_seqs=1, max_num_batched_tokens=64)
    expected = run(runner, first, scored, enable_prefix_caching=False)
    assert outputs[1].num_cached_tokens == 0
    assert_close(pairs(outputs[1].prompt_logprobs), pairs(expected[1].prompt_logprobs))
    assert outputs[1].token_ids == expected[1].token_ids


def test_a_prompt_of_one_token_has_nothing_to_score(runner: ModelRunner) -> None:
    told, core = run_core(runner, {1: ([7], SamplingParams(**SCORED))}, lambda params: Spelling())
    assert told[1].prompt_logprobs == [None]
    assert core.stats().generation_tokens == 0


def test_what_was_sampled_can_be_scored_again(runner: ModelRunner) -> None:
    """Output logprobs are those that the same tokens have as part of a prompt."""
    output = only(runner, logprobs=2)
    longer = PROMPT + output.token_ids
    told, _ = run_core(runner, {1: (longer, SamplingParams(**SCORED))}, lambda params: Spelling())
    scored = told[1].prompt_logprobs
    if runner.model.simulated:
        return  # it looks at the request's id, and at no token
    assert_close(pairs(scored)[len(PROMPT) - 1 :], pairs(output.logprobs))
