"""What a request's extras remember, against plain counting; and what a step makes of them."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.requests import make_request
from helpers.sampling_reference import Extras, give_extras
from trioengine.engine_proc.runner import SamplingRows
from trioengine.engine_proc.sampling_extras import (
    BadWords,
    SamplingExtras,
    TokenCounts,
    add_extras,
    allow_words,
)
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.engine_proc.request import Request

VOCAB = 100
tokens = st.lists(st.integers(0, 9), max_size=30)


def blank_rows(count: int) -> SamplingRows:
    return SamplingRows(
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        min_p=np.zeros(count, np.float32),
        seeds=np.zeros(count, np.uint64),
        positions=np.zeros(count, np.int64),
        request_ids=np.zeros(count, np.int64),
        all_greedy=True,
        masked_token_ids=[],
    )


def asking(prompt: list[int], output: list[int], params: SamplingParams) -> Request:
    request = make_request(prompt + output, num_output_tokens=len(output), params=params)
    request.extras = SamplingExtras.of(params, prompt, VOCAB)
    return request


@given(tokens, st.lists(tokens, max_size=5), st.booleans())
def test_counts_are_kept_up_to_date(
    prompt: list[int], outputs: list[list[int]], with_prompt: bool
) -> None:
    sequence = array("i", prompt)
    counts = TokenCounts(prompt if with_prompt else [], len(prompt))
    output: list[int] = []
    for more in outputs:
        sequence.extend(more)
        output += more
        counts.catch_up(sequence)
        expected = dict.fromkeys(prompt, 0) if with_prompt else {}
        expected |= Counter(output)
        assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_counts_grow_past_their_first_room() -> None:
    counts = TokenCounts([], 0)
    counts.catch_up(array("i", range(1000)))
    assert counts.token_ids.tolist() == list(range(1000))
    assert counts.counts.tolist() == [1] * 1000


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_a_token_is_banned_where_it_would_complete_a_word(
    prompt: list[int], output: list[int], words: list[list[int]]
) -> None:
    banned = BadWords(words).banned(array("i", prompt + output), len(prompt))
    expected = {
        token
        for token in range(3)
        for word in words
        if [*output, token][-len(word) :] == word and len(word) <= len(output) + 1
    }
    assert set(banned) == expected


def test_allowed_tokens_are_bits() -> None:
    words = allow_words([0, 31, 32, 99, 99], 100)
    assert words.tolist() == [1 | 1 << 31, 1, 0, 1 << 3]


def test_most_requests_have_no_extras() -> None:
    plain = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_tokens=3, stop=("x",))
    assert SamplingExtras.of(plain, [1], VOCAB) is None
    assert SamplingExtras.of(SamplingParams(prompt_logprobs=1), [1], VOCAB) is None
    assert SamplingExtras.of(SamplingParams(logprobs=0), [1], VOCAB) is not None


def test_rows_get_what_their_requests_ask_for_and_nothing_else() -> None:
    full = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias={7: 2.0, 8: -3.0},
        allowed_token_ids=(1, 40),
        bad_words_token_ids=((5,), (2, 3)),
        logprobs=4,
    )
    requests = [
        asking([1, 2, 2], [2, 9, 2], full),
        asking([4], [], SamplingParams()),
        asking([4, 4], [6, 6], SamplingParams(frequency_penalty=1.0)),
    ]
    rows = blank_rows(3)
    add_extras(rows, requests)
    expected = blank_rows(3)
    row = Extras(
        0.5, -0.25, 1.5, ((7, 2.0), (8, -3.0)), (1, 40), (5, 3), 4, -1, (1, 2, 2), (2, 9, 2)
    )
    give_extras(expected, [row, Extras(), Extras(frequency=1.0, output=(6, 6))], VOCAB)
    assert rows.targets is None
    rows.targets = expected.targets
    for part in ("penalties", "bias", "allow"):
        got, wanted = getattr(rows, part), getattr(expected, part)
        for name in wanted.__slots__:
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
            ours, theirs = np.asarray(getattr(got, name)), np.asarray(getattr(wanted, name))
            assert ours.dtype == theirs.dtype
    assert rows.masked_token_ids == expected.masked_token_ids
    assert rows.logprobs_k is not None
    assert rows.logprobs_k.tolist() == [4, -1, -1]


def test_a_step_of_which_nobody_asks_anything_builds_nothing() -> None:
    rows = blank_rows(1)
    add_extras(rows, [asking([4], [], SamplingParams())])
    assert (rows.penalties, rows.bias, rows.allow, rows.logprobs_k) == (None, None, None, None)
    assert rows.masked_token_ids == []
