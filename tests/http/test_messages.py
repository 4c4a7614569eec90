from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.messages import MAX_MESSAGES, normalise, template_arguments
from trioengine.http.schemas import ChatMessage


def normalised(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return normalise(msgspec.convert(list(messages), list[ChatMessage]))


def test_a_full_tool_conversation_is_made_tidy() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = normalised(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "tool_calls": []},
    )
    assert turns == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("spelled", "arguments"),
    [
        (None, {}),
        ("", {}),
        ("{", "{"),
        ("not json", "not json"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_that_are_no_json_stay_text(spelled: str | None, arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": spelled}}
    (turn,) = normalised({"role": "assistant", "tool_calls": [call]})
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url' is not supported"),
        ({"type": "text"}, "has no text"),
        ({"type": "text", "text": None}, "has no text"),
    ],
)
def test_a_part_that_is_not_text_is_refused_by_name(part: dict[str, Any], message: str) -> None:
    text = {"type": "text", "text": "a"}
    with pytest.raises(InvalidRequestError, match=message) as caught:
        normalised({"role": "user", "content": "a"}, {"role": "user", "content": [text, part]})
    assert caught.value.param == "messages[1].content[1]"


def test_a_refusal_in_the_history_is_text() -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    assert normalised({"role": "assistant", "content": parts})[0]["content"] == "no"


def test_reasoning_goes_by_the_name_that_templates_know() -> None:
    (turn,) = normalised({"role": "assistant", "content": "a", "reasoning": "because"})
    assert turn["reasoning_content"] == "because"


@pytest.mark.parametrize("count", [0, MAX_MESSAGES + 1])
def test_the_number_of_messages_is_bounded(count: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalise([ChatMessage(role="user", content="a")] * count)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("raw", [b"", b"null", b"{}"])
def test_no_template_arguments(raw: bytes) -> None:
    assert template_arguments(msgspec.Raw(raw)) == {}


def test_template_arguments() -> None:
    assert template_arguments(msgspec.Raw(b'{"enable_thinking": false}')) == {
        "enable_thinking": False
    }


@pytest.mark.parametrize(
    "value",
    [[], "x", 5, True, {"messages": []}, {"self": 1}, {"tools": []}, {"a": "x" * 100_000}],
)
def test_template_arguments_that_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template_arguments(msgspec.Raw(json.dumps(value).encode()))
    assert caught.value.param == "chat_template_kwargs"


def test_deep_template_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        template_arguments(msgspec.Raw(b"[" * 20_000))
