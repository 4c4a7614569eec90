"""What can be wrong with an Add, and what a right one becomes."""

from __future__ import annotations

import pytest

from helpers.requests import Spelling
from trioengine.engine_proc.intake import Intake
from trioengine.errors import InvalidRequestError
from trioengine.protocol import Add, ModelInfo
from trioengine.sampling_params import SamplingParams
from trioengine.structured import StructuredOutput

MODEL = ModelInfo("m", "sim", True, max_model_len=10, vocab_size=100, eos_token_ids=(0, 1))


def intake(seed: int = 0) -> Intake:
    return Intake(MODEL, lambda params: Spelling(), seed=seed)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "empty"),
        ([1] * 10, "10 tokens"),
        ([5, -1], r"\[0, 100\)"),
        ([100], r"\[0, 100\)"),
        ([2**40], r"\[0, 100\)"),
        ([-(2**70)], r"\[0, 100\)"),
    ],
)
def test_a_prompt_that_cannot_be_served(prompt: list[int], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        intake().make_request(Add(1, prompt, SamplingParams()))


def test_a_prompt_that_leaves_room_for_one_token_is_served() -> None:
    assert intake().make_request(Add(1, [1] * 9, SamplingParams())).max_len == 10


def test_a_prompt_that_is_only_scored_may_fill_the_model() -> None:
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    request = intake().make_request(Add(1, [1] * 10, scored))
    assert request.max_len == 10
    assert request.needs_all_logits
    with pytest.raises(InvalidRequestError, match="11 tokens"):
        intake().make_request(Add(1, [1] * 11, scored))


def test_a_parameter_that_names_no_token_is_refused() -> None:
    params = SamplingParams(stop_token_ids=(100,), min_tokens=1)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        intake().make_request(Add(1, [1], params))


@pytest.mark.parametrize(("max_tokens", "max_len"), [(None, 10), (3, 5), (1000, 10)])
def test_the_answer_ends_at_max_tokens_or_the_models_length(
    max_tokens: int | None, max_len: int
) -> None:
    add = Add(1, [2, 3], SamplingParams(max_tokens=max_tokens))
    assert intake().make_request(add).max_len == max_len


def test_what_ends_a_sequence() -> None:
    params = SamplingParams(stop_token_ids=(7,))
    request = intake().make_request(Add(1, [2], params))
    assert sorted(request.eos_ids) == [0, 1]
    assert sorted(request.ending_ids) == [0, 1, 7]
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    request = intake().make_request(Add(1, [2], ignoring))
    assert not request.eos_ids
    assert sorted(request.ending_ids) == [7]


def test_seeds_are_kept_or_drawn_from_the_engines() -> None:
    def seeds(source: Intake, seed: int | None) -> list[int]:
        add = Add(1, [2], SamplingParams(seed=seed))
        return [source.make_request(add).seed for _ in range(3)]

    assert seeds(intake(), 5) == [5, 5, 5]
    assert seeds(intake(), -1) == [2**64 - 1] * 3
    drawn = seeds(intake(1), None)
    assert len(set(drawn)) == 3
    assert drawn == seeds(intake(1), None)
    assert drawn != seeds(intake(2), None)


def test_rank_is_priority_then_arrival() -> None:
    source = intake()
    adds = [Add(index, [2], SamplingParams(), priority) for index, priority in enumerate((1, 0, 0))]
    ranks = [source.make_request(add).rank for add in adds]
    assert sorted(ranks) == [ranks[1], ranks[2], ranks[0]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(bad_words_token_ids=((5, 6),)),
        SamplingParams(structured=StructuredOutput("json_object")),
    ],
)
def test_whoever_looks_back_at_its_tokens_goes_one_step_at_a_time(params: SamplingParams) -> None:
    assert intake().make_request(Add(1, [2], params)).single_steps
    plain = SamplingParams(seed=1, top_p=0.5, min_tokens=3, logprobs=2, logit_bias={5: 1.0})
    assert not intake().make_request(Add(2, [2], plain)).single_steps
