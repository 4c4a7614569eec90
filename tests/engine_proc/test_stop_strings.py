from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from trioengine.engine_proc.stop_strings import StopScanner

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def first_completed(text: str, stops: tuple[str, ...], after: int = 0) -> tuple[str, str | None]:
    """Say it again, slowly: look at every end of the text in order, longest stop string first."""
    for end in range(after + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def scan(pieces: list[str], stops: tuple[str, ...], ignored: int = 0) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = ""
    for index, piece in enumerate(pieces):
        settled, stop = scanner.feed(piece, armed=index >= ignored)
        text += settled
        if stop is not None:
            return text, stop
    return text + scanner.flush(), None


@given(LETTERS, STOPS, st.lists(st.integers(0, 14)))
@example("abcd", ("abcd", "bc"), [1, 2, 3])  # the shorter one is complete first
def test_any_cut_gives_what_one_look_at_the_whole_text_gives(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert scan(pieces, stops) == first_completed(text, stops)


@given(LETTERS, LETTERS, STOPS)
def test_a_stop_string_completed_while_disarmed_does_not_count(
    early: str, late: str, stops: tuple[str, ...]
) -> None:
    # ... but one that only begins there does.
    expected = first_completed(early + late, stops, after=len(early))
    assert scan([*early, *late], stops, ignored=len(early)) == expected


@given(LETTERS, STOPS)
def test_holds_back_exactly_what_may_begin_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    scanner = StopScanner(stops)
    settled = ""
    for end, character in enumerate(text, 1):
        new, stop = scanner.feed(character, armed=True)
        settled += new
        if stop is not None:
            return
        ends = (text[start:end] for start in range(end))
        held = next((e for e in ends if any(s.startswith(e) for s in stops)), "")
        assert settled + held == text[:end]


def test_an_ignored_match_is_not_held_back() -> None:
    scanner = StopScanner(("END",))
    assert scanner.feed("x END", armed=False) == ("x END", None)
    assert scanner.feed("END", armed=True) == ("", "END")


def test_flush_returns_what_was_held_and_starts_anew() -> None:
    scanner = StopScanner(("END",))
    assert scanner.feed("the EN", armed=True) == ("the ", None)
    assert scanner.flush() == "EN"
    assert scanner.feed("D", armed=True) == ("D", None)
