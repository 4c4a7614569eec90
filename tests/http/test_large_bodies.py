from __future__ import annotations

import json
from typing import Any

import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.bodies import BodyDecoder
from trioengine.http.large_bodies import LARGE_BYTES, MAX_NAMES
from trioengine.http.messages import MAX_MESSAGES
from trioengine.http.schemas import ChatCompletionRequest, CompletionRequest

PADDING = "x" * (LARGE_BYTES + 1)  # in a field that nobody reads
COMPLETION = BodyDecoder(CompletionRequest)
CHAT = BodyDecoder(ChatCompletionRequest)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def decode(decoder: BodyDecoder[Any], body: dict[str, Any], *, large: bool = True) -> Any:
    padding = {"padding": PADDING} if large else {}
    return decoder.decode(json.dumps(body | padding).encode())


def refusal(decoder: BodyDecoder[Any], body: dict[str, Any], *, large: bool = True) -> Any:
    with pytest.raises(InvalidRequestError) as caught:
        decode(decoder, body, large=large)
    return caught.value


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (COMPLETION, {}),
        (COMPLETION, {"stop": "a", "logit_bias": {"5": 1}, "n": 2, "bad_words": ["x"]}),
        (COMPLETION, {"stop": ["a"], "allowed_token_ids": [1, 2], "stop_token_ids": None}),
        (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}),
    ],
)
def test_a_large_body_is_read_as_a_small_one(decoder: Any, body: dict[str, Any]) -> None:
    large, small = decode(decoder, body), decode(decoder, body, large=False)
    for name in type(small).__struct_fields__:
        values = getattr(large, name), getattr(small, name)
        if type(values[0]).__name__ != "Raw":
            assert values[0] == values[1]


@pytest.mark.parametrize(
    ("decoder", "body"),
    [
        (COMPLETION, {"logit_bias": {"a": 1}}),
        (COMPLETION, {"stop": [1]}),
        (COMPLETION, {"stop_token_ids": ["x"]}),
        (COMPLETION, {"n": "x"}),
        (COMPLETION, {"allowed_token_ids": {}}),
        (CHAT, {}),
        (CHAT, {"messages": {}}),
        (CHAT, {"messages": [*HELLO, {"content": "x"}]}),
        (CHAT, {"messages": [*HELLO, {"role": "nobody"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": 5}]}]}),
    ],
)
def test_a_large_body_is_refused_as_a_small_one(decoder: Any, body: dict[str, Any]) -> None:
    large, small = refusal(decoder, body), refusal(decoder, body, large=False)
    assert (large.param, large.message) == (small.param, small.message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["a"] * 100_000),
        ("stop_token_ids", [1] * 200_000),
        ("bad_words", ["a"] * 200_000),
        ("allowed_token_ids", [1] * 300_000),
        ("logit_bias", {str(i): 1 for i in range(100_000)}),
    ],
)
def test_a_list_that_is_far_too_long_is_refused_undecoded(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untouchable:
        def decode(self, _: bytes) -> None:
            raise AssertionError("decoded")

    decoder = BodyDecoder(CompletionRequest)
    monkeypatch.setattr(decoder._large, "_decoders", {name: Untouchable()})
    assert refusal(decoder, {name: value}).param == name


def test_too_many_messages_or_parts_are_refused_undecoded() -> None:
    few = {"messages": HELLO * MAX_MESSAGES}
    assert len(decode(CHAT, few, large=False).messages) == MAX_MESSAGES
    assert refusal(CHAT, {"messages": HELLO * (MAX_MESSAGES + 1)}).param == "messages"
    parts = [{"type": "text", "text": "a"}] * (4 * MAX_MESSAGES + 1)
    assert refusal(CHAT, {"messages": [{"role": "user", "content": parts}]}).param == "messages"


def test_what_a_text_quotes_is_not_counted() -> None:
    text = '"role" "type" ' * (4 * MAX_MESSAGES + 1)
    body = decode(CHAT, {"messages": [{"role": "user", "content": text}]})
    assert body.messages[0].content == text


NAMES = [b'"a":', b'"\\u0061":', b'"" \n :', b'"\\\\":', b'"\\\\\\\\" :']


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("frame", [b"{%b}", b'{"messages": [{%b}]}', b'{"junk": {%b}}'], ids=repr)
def test_more_names_than_any_request_needs_are_refused_undecoded(
    frame: bytes, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = BodyDecoder(CompletionRequest)
    few = b",".join([name + b"1"] * (MAX_NAMES - 1))
    many = b",".join([name + b"1"] * (MAX_NAMES + 1))
    assert json.loads(frame % many)
    decoder.decode(frame % few)
    monkeypatch.delattr(decoder, "_large")
    with pytest.raises(InvalidRequestError, match="262144 members"):
        decoder.decode(frame % many)


@pytest.mark.parametrize("text", ["12:30 ", '"role": ', '{"a" :1}', "\\:"])
def test_names_that_a_text_quotes_are_not_counted(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text * (MAX_NAMES + 1)}]}
    assert CHAT.decode(json.dumps(body).encode()).messages[0].content == text * (MAX_NAMES + 1)


def test_the_last_of_two_values_counts_in_a_large_body_too() -> None:
    data = b'{"stop": ["a"], "padding": "' + PADDING.encode() + b'", "stop": ["b"]}'
    assert COMPLETION.decode(data).stop == ["b"]
