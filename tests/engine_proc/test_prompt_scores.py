"""Which rows a chunk of a prompt needs for its tokens to be scored, and no row twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.requests import make_request
from trioengine.engine_proc.prompt_scores import scored_spans
from trioengine.engine_proc.scheduler import PrefillChunk
from trioengine.errors import InternalError
from trioengine.outputs import TokenLogprob
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request


def scoring(num_prompt: int, num_output: int = 0) -> Request:
    request = make_request(
        range(100, 100 + num_prompt + num_output),
        num_output_tokens=num_output,
        params=SamplingParams(prompt_logprobs=1),
    )
    request.prompt_logprobs = [None]
    return request


def found(request: Request, count: int) -> None:
    assert request.prompt_logprobs is not None
    request.prompt_logprobs += [TokenLogprob(0, 0.0, 1, [])] * count


def test_every_token_but_the_first_is_scored_once_over_the_chunks() -> None:
    request, targets, flats = scoring(10), [], []
    for size in (3, 1, 6):
        (*spans,) = scored_spans([PrefillChunk(request, size)], [20])
        for span in spans:
            targets += span.targets.tolist()
            flats += [span.flat + i - 20 + request.num_computed for i in range(span.num_tokens)]
            found(request, span.num_tokens)
        request.num_computed += size
    assert targets == list(range(101, 110))
    assert flats == list(range(9))  # the row of the token before each
    assert not request.needs_all_logits


def test_what_is_known_is_not_asked_for_after_a_preemption() -> None:
    request = scoring(10)
    found(request, 4)
    (span,) = scored_spans([PrefillChunk(request, 8)], [0])
    assert span.targets.tolist() == [105, 106, 107, 108]
    assert span.flat == 4


def test_output_tokens_are_no_prompt() -> None:
    request = scoring(3, num_output=5)
    (span,) = scored_spans([PrefillChunk(request, 8)], [0])
    assert span.targets.tolist() == [101, 102]
    found(request, 2)
    assert scored_spans([PrefillChunk(request, 8)], [0]) == []


def test_who_asks_for_nothing_has_no_rows() -> None:
    assert scored_spans([PrefillChunk(make_request(range(5)), 5)], [0]) == []


def test_tokens_passed_over_are_an_error_and_not_a_gap() -> None:
    request = scoring(10)
    request.num_computed = 4
    with pytest.raises(InternalError, match="scored up to 1"):
        scored_spans([PrefillChunk(request, 3)], [0])
