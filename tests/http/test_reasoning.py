from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.http.reasoning import ReasoningSplitter, Split, is_open

BITS = ["<think>", "</think>", "<", "</", "think>", "<th", "ink>", " ", "\n", "a", "b c", "é"]
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


def split(*pieces: str, inside: bool = False) -> Split:
    splitter = ReasoningSplitter(inside=inside)
    parts = [splitter.feed(piece) for piece in pieces]
    parts.append(splitter.flush())
    return Split("".join(p.reasoning for p in parts), "".join(p.content for p in parts))


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("hm\n</think>\n\nyes ", True, "hm", "yes "),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("no thought", False, "", "no thought"),
        (" \n no thought", False, "", " \n no thought"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<think>cut  ", False, "cut", ""),
        ("never closed", True, "never closed", ""),
        ("a</think>b</think>c<think>", True, "a", "b</think>c<think>"),
        ("<thi", False, "", "<thi"),
        ("<thin ice", False, "", "<thin ice"),
        ("  ", False, "", "  "),
        ("", True, "", ""),
    ],
)
def test_what_was_thought_and_what_was_said(
    text: str, inside: bool, reasoning: str, content: str
) -> None:
    assert split(text, inside=inside) == (reasoning, content)


@given(texts, st.booleans())
def test_every_way_to_cut_the_text_in_two_splits_it_alike(text: str, inside: bool) -> None:
    whole = split(text, inside=inside)
    for at in range(len(text) + 1):
        assert split(text[:at], text[at:], inside=inside) == whole


@given(texts, st.booleans())
def test_one_character_at_a_time_splits_it_alike(text: str, inside: bool) -> None:
    assert split(*text, inside=inside) == split(text, inside=inside)


def split_at_once(text: str, *, inside: bool) -> tuple[str, str]:
    if not inside:
        begun = text.lstrip()
        if not begun.startswith("<think>"):
            return "", text
        text = begun.removeprefix("<think>")
    reasoning, _, content = text.partition("</think>")
    return reasoning.strip(), content.lstrip()


@given(texts, st.booleans())
def test_the_split_is_the_one_of_the_whole_text(text: str, inside: bool) -> None:
    assert split(text, inside=inside) == split_at_once(text, inside=inside)


def test_reasoning_is_told_while_it_grows() -> None:
    splitter = ReasoningSplitter(inside=False)
    told = [splitter.feed(piece) for piece in ("<think>", "one ", "two", " </th", "e end")]
    assert [part.reasoning for part in told] == ["", "one", " two", "", " </the end"]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
        ("<think>a</think>b<think>c", True),
    ],
)
def test_where_a_prompt_leaves_the_model(text: str, inside: bool) -> None:
    assert is_open(text) is inside
