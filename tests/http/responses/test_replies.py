"""Items of a response one after the other: thoughts, a message, calls."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from trioengine.http.details import Piece
from trioengine.http.replies import Choice, new_head
from trioengine.http.responses.replies import ResponseReplies
from trioengine.http.responses.request import ResponseRequest
from trioengine.http.tools.reader import MadeCall
from trioengine.outputs import FinishReason, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLS = [MadeCall(0, "call_1", "now", '{"tz": "CET"}'), MadeCall(1, "call_2", "now", "{}")]
USAGE = Usage(7, 5, 3)


def new_replies() -> ResponseReplies:
    return ResponseReplies(new_head("resp_", "m", "fp"), ResponseRequest(input="a"))


def events_of(data: bytes) -> list[Any]:
    return [
        EVENT.validate_json(frame.split("data: ", 1)[1])
        for frame in data.decode().strip().split("\n\n")
    ]


def test_every_item_is_added_filled_and_done_before_the_next() -> None:
    replies = new_replies()
    data = replies.opening(0)
    data += replies.piece(0, Piece(reasoning="Hm"))
    data += replies.piece(0, Piece(reasoning=", well.", text="It"))
    data += replies.text(0, " is")
    data += replies.piece(0, Piece(text=" noon.", calls=CALLS))
    data += replies.finish(0, "tool_calls", None) + replies.usage(USAGE)
    events = events_of(data)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    opened: list[int] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(opened)
            opened.append(0)
        elif event.type == "response.output_item.done":
            assert event.output_index == len(opened) - 1
            assert opened[-1] == 0
            opened[-1] = 1
    assert opened == [1, 1, 1, 1]
    response = events[-1].response
    assert events[-1].type == "response.completed"
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text == "It is noon."
    assert response.output[0].content[0].text == "Hm, well."
    assert response.output[2].arguments == '{"tz": "CET"}'
    assert response.usage.input_tokens_details.cached_tokens == 3


def test_the_whole_has_the_same_items() -> None:
    choice = Choice("It is noon.", "tool_calls", None)
    choice.details = Piece(text="It is noon.", reasoning="Hm", calls=CALLS)
    response = Response.model_validate_json(new_replies().whole([choice], USAGE))
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.status == "completed"


def test_a_call_alone_is_no_message() -> None:
    choice = Choice("", "tool_calls", None)
    choice.details = Piece(calls=CALLS)
    response = Response.model_validate_json(new_replies().whole([choice], USAGE))
    assert {item.type for item in response.output} == {"function_call"}


def test_a_reply_without_a_word_is_an_empty_message() -> None:
    response = Response.model_validate_json(
        new_replies().whole([Choice("", FinishReason.STOP, None)], USAGE)
    )
    assert [item.type for item in response.output] == ["message"]
