from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.errors import InvalidRequestError
from trioengine.http.prompts import MAX_PROMPTS, Prompt, read_prompts

LIMIT, VOCAB = 8, 100


def read(text: str) -> list[Prompt]:
    return list(read_prompts(msgspec.Raw(text.encode()), max_model_len=LIMIT, vocab_size=VOCAB))


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('"a"', ["a"]),
        ('""', [""]),
        ('["a", "b]["]', ["a", "b]["]),
        ("[1, 2]", [[1, 2]]),
        ("[[1], [2, 3]]", [[1], [2, 3]]),
        (" [ [ 1 , 2 ] , [ 3 ] ] ", [[1, 2], [3]]),
        ("[\n[0]\n]", [[0]]),
        ("[[99]]", [[99]]),
        ("[1,2,3,4,5,6,7,8]", [[1, 2, 3, 4, 5, 6, 7, 8]]),
    ],
)
def test_text_ids_and_lists_of_either(text: str, prompts: list[Prompt]) -> None:
    assert read(text) == prompts


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "5", "true", "{}", "[]", "[[]]", "[[1], []]", "[null]", "[true]", "[1.0]",
        '[1, "a"]', '["a", 1]', '["a", [1]]', '[[1], "a"]', '[["a"]]', "[[[1]]]", "[[1, [2]]]",
        "[[1], 2]", "[-1]", "[100]", "[[100]]", "[99999999999999999999999]", '[{"a": 1}]',
        "[[1e2]]", '["\\ud800"]',
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(text)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize("text", ["[1,1,1,1,1,1,1,1,1]", "[[1],[1,1,1,1,1,1,1,1,1]]"])
def test_ids_that_cannot_fit_are_refused_with_the_numbers(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(text)
    assert caught.value.code == "context_length_exceeded"
    assert "8 tokens" in caught.value.message
    assert "9 tokens" in caught.value.message


@pytest.mark.parametrize("item", ['"a"', "[1]"])
def test_the_number_of_prompts_is_bounded(item: str) -> None:
    assert len(read("[" + ",".join([item] * MAX_PROMPTS) + "]")) == MAX_PROMPTS
    with pytest.raises(InvalidRequestError, match="2048 entries"):
        read("[" + ",".join([item] * (MAX_PROMPTS + 1)) + "]")


def test_brackets_are_counted_before_lists_are_made() -> None:
    with pytest.raises(InvalidRequestError, match="2048 entries"):
        read("[" + "[]," * 200_000 + "[]]")


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LIMIT)


@given(st.text() | ids | st.lists(st.text(), min_size=1) | st.lists(ids, min_size=1), st.booleans())
def test_reading_is_the_inverse_of_writing(prompt: Any, wide: bool) -> None:
    text = json.dumps(prompt, indent=1 if wide else None)
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    assert read(text) == (prompt if several else [prompt])
