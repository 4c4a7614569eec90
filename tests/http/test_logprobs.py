from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.http.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from trioengine.outputs import TokenLogprob
from trioengine.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary.simulated(300)  # 0 is special, 1 + b is byte b, then words
NAMES = TokenNames(VOCABULARY)
SMILE = [1 + byte for byte in "😀".encode()]
INF, NAN = float("inf"), float("nan")


def entry(
    token_id: int, logprob: float = -1.0, top: list[tuple[int, float]] | None = None
) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, 1, top or [])


def plain(value: object) -> Any:
    """As a client sees it."""
    return json.loads(msgspec.json.encode(value))


def test_a_token_is_called_by_its_text_and_a_special_one_by_its_name() -> None:
    assert [NAMES.name(i) for i in (1 + ord("a"), 257, 0, 999)] == [
        "a",
        " beba",
        "<|endoftext|>",
        "",
    ]
    assert NAMES.name(SMILE[0]) == "\ufffd"
    assert TokenNames(VOCABULARY, as_ids=True).name(257) == "token_id:257"


def test_a_chat_has_the_schema_of_chats() -> None:
    got = plain(chat_logprobs(NAMES, [entry(257, -0.5, [(257, -0.5), (1 + ord("a"), -2.0)])], 2))
    assert got == {
        "content": [
            {
                "token": " beba",
                "logprob": -0.5,
                "bytes": list(b" beba"),
                "top_logprobs": [
                    {"token": " beba", "logprob": -0.5, "bytes": list(b" beba")},
                    {"token": "a", "logprob": -2.0, "bytes": [97]},
                ],
            }
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("num_top", [0, 1])
def test_of_more_alternatives_than_asked_for_the_likeliest_are_told(num_top: int) -> None:
    one = entry(258, -3.0, [(257, -0.5), (259, -1.0)])
    (got,) = plain(chat_logprobs(NAMES, [one], num_top))["content"]
    assert [top["token"] for top in got["top_logprobs"]] == [" beba"][:num_top]


def test_a_completion_has_the_token_itself_beside_the_likeliest() -> None:
    one = entry(258, -3.0, [(257, -0.5), (259, -1.0)])
    got = plain(completion_logprobs(NAMES, [None, one], [257, 258], [0, 5], 1))
    own = NAMES.text(258)
    assert got == {
        "tokens": [" beba", own],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {" beba": -0.5, own: -3.0}],
        "text_offset": [0, 5],
    }


def test_of_tokens_that_read_alike_the_likeliest_is_kept() -> None:
    """lm-evaluation-harness compares a token with the largest of the likeliest."""
    one = entry(SMILE[1], -4.0, [(SMILE[0], -0.25), (SMILE[1], -4.0)])
    (top,) = completion_logprobs(NAMES, [one], [SMILE[1]], [0], 2).top_logprobs
    assert top == {"\ufffd": -0.25}


@pytest.mark.parametrize("bad", [-INF, NAN, INF, -1e9])
def test_json_gets_finite_numbers_only(bad: float) -> None:
    one = entry(257, bad, [(258, bad)])
    chat = plain(chat_logprobs(NAMES, [one], 1))["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    completion = plain(completion_logprobs(NAMES, [one], [257], [0], 1))
    assert completion["token_logprobs"] == [-9999.0]
    assert set(completion["top_logprobs"][0].values()) == {-9999.0}
    (prompt,) = plain(prompt_logprobs(NAMES, [one], 1))
    assert {item["logprob"] for item in prompt.values()} == {-9999.0}


def test_prompt_logprobs_are_by_id_with_ranks() -> None:
    one = TokenLogprob(258, -3.0, 17, [(257, -0.5), (259, -1.0)])
    assert plain(prompt_logprobs(NAMES, [None, one], 2)) == [
        None,
        {
            "258": {"logprob": -3.0, "rank": 17, "decoded_token": NAMES.text(258)},
            "257": {"logprob": -0.5, "rank": 1, "decoded_token": " beba"},
            "259": {"logprob": -1.0, "rank": 2, "decoded_token": NAMES.text(259)},
        },
    ]


ids = st.lists(st.integers(0, 299), max_size=12)


@given(ids, st.integers(0, 12), st.integers(0, 9))
def test_offsets_do_not_depend_on_how_tokens_are_grouped(
    token_ids: list[int], at: int, start: int
) -> None:
    whole = TextOffsets(NAMES, start, skip_special_tokens=True).take(token_ids)
    parts = TextOffsets(NAMES, start, skip_special_tokens=True)
    assert parts.take(token_ids[:at]) + parts.take(token_ids[at:]) == whole
    assert whole == sorted(whole)


def test_offsets_find_their_tokens_in_the_text() -> None:
    token_ids = [257, 1 + ord("x"), *SMILE, 0, 258]
    text = " bebax😀" + NAMES.text(258)
    offsets = TextOffsets(NAMES, skip_special_tokens=True).take(token_ids)
    assert offsets == [0, 5, 6, 6, 6, 6, 7, 7]
    assert text[offsets[-1] :] == NAMES.text(258)
    with_names = TextOffsets(NAMES, skip_special_tokens=False).take(token_ids)
    assert with_names[-1] == 7 + len("<|endoftext|>")


def test_what_the_tokenizer_puts_before_a_prompt_begins_at_its_start() -> None:
    token_ids = [0, 257, 258]
    text = (NAMES.text(257) + NAMES.text(258)).lstrip()
    assert prompt_offsets(NAMES, token_ids, len(text)) == [0, 0, 4]
    assert prompt_offsets(NAMES, token_ids[1:], len(text) + 1) == [0, 5]
