"""A reply in pieces: each call is told once, in order, with an id of its own."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trioengine.http.tools.reader import MadeCall, ToolReader, ToolReading

TEXT = (
    'Look.\n<tool_call>{"name": "a", "arguments": {"x": "<tool"}}</tool_call>\n'
    '<tool_call>{"name": "b", "arguments": {}}</tool_call> done <tool'
)


def read(pieces: list[str], *, parallel: bool = True) -> tuple[str, list[MadeCall]]:
    reader = ToolReader(ToolReading("hermes", parallel=parallel, named=False))
    content, calls = "", []
    for number, piece in enumerate(pieces):
        more, made = reader.feed(piece, final=number == len(pieces) - 1)
        content += more
        calls += made
    assert reader.num_calls == len(calls)
    return content, calls


@given(cuts=st.sets(st.integers(1, len(TEXT) - 1)))
def test_any_pieces_give_the_same(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    content, calls = read([TEXT[a:b] for a, b in itertools.pairwise(edges)])
    assert content == "Look.\n done <tool"
    assert [(call.index, call.name, call.arguments) for call in calls] == [
        (0, "a", '{"x": "<tool"}'),
        (1, "b", "{}"),
    ]
    assert len({call.id for call in calls}) == 2


def test_without_parallel_calls_only_the_first_counts() -> None:
    content, calls = read([TEXT], parallel=False)
    assert [call.name for call in calls] == ["a"]
    assert content == "Look.\n done <tool"
