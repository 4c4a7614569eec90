from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioengine.http.chunks import ChatReplies, CompletionReplies
from trioengine.http.replies import Choice, Replies, ReplyHead, new_head
from trioengine.outputs import FinishReason, Usage

HEAD = ReplyHead("id-1", 1_700_000_000, 'a "model" 0b7c6a52', "fp_1")
USAGE = Usage(7, 5, 3)
USAGE_JSON = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
}
KINDS = [ChatReplies, CompletionReplies]


def one_event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    event: dict[str, Any] = msgspec.json.decode(data[6:])
    return event


def opened(kind: type[Replies], *, include_usage: bool = False) -> Replies:
    replies: Replies = kind(HEAD, include_usage=include_usage)  # type: ignore[call-arg]
    replies.opening(0)
    return replies


@given(st.text(min_size=1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_event_carries_exactly_its_text(kind: type[Replies], text: str) -> None:
    event = one_event(opened(kind).text(0, text))
    (choice,) = event["choices"]
    assert (choice.get("text") or choice["delta"]["content"]) == text
    assert event["model"] == HEAD.model
    assert "usage" not in event


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_has_the_keys_that_strict_clients_need(kind: type[Replies]) -> None:
    replies = opened(kind)
    content = "delta" if kind is ChatReplies else "text"
    events = [replies.text(0, "x"), replies.finish(0, FinishReason.STOP, None)]
    events += [replies.opening(1)] if kind is ChatReplies else []
    for data in events:
        (choice,) = one_event(data)["choices"]
        assert {"index", content, "logprobs", "finish_reason"} <= set(choice)


def test_a_chat_begins_with_its_role_and_ends_with_an_empty_delta() -> None:
    replies = ChatReplies(HEAD, include_usage=False)
    opening = one_event(replies.opening(2))["choices"][0]
    assert opening["index"] == 2
    assert opening["delta"] == {"role": "assistant", "content": "", "refusal": None}
    finish = one_event(replies.finish(2, FinishReason.LENGTH, None))["choices"][0]
    assert (finish["delta"], finish["finish_reason"]) == ({}, "length")


def test_a_completion_begins_with_its_text() -> None:
    assert CompletionReplies(HEAD, include_usage=False).opening(0) == b""


@pytest.mark.parametrize("stop_reason", ["</s>", 2, None])
@pytest.mark.parametrize("kind", KINDS)
def test_stop_reason_is_passed_on(kind: type[Replies], stop_reason: int | str | None) -> None:
    finish = one_event(opened(kind).finish(0, FinishReason.STOP, stop_reason))
    assert finish["choices"][0]["stop_reason"] == stop_reason


@pytest.mark.parametrize("kind", KINDS)
def test_usage_is_null_until_the_last_event(kind: type[Replies]) -> None:
    replies = opened(kind, include_usage=True)
    for data in (replies.text(0, "x"), replies.finish(0, FinishReason.STOP, None)):
        assert one_event(data)["usage"] is None
    last = one_event(replies.usage(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE_JSON)


def test_chat_objects_are_what_the_official_client_expects() -> None:
    replies = ChatReplies(new_head("chatcmpl-", "m", "fp"), include_usage=True)
    choices = [Choice("a", FinishReason.STOP, None), Choice("", FinishReason.LENGTH, None)]
    whole = ChatCompletion.model_validate_json(replies.whole(choices, USAGE), strict=True)
    assert [choice.message.content for choice in whole.choices] == ["a", ""]
    assert whole.usage is not None
    assert whole.usage.total_tokens == 12
    for data in (
        replies.opening(0),
        replies.text(0, "x"),
        replies.finish(0, FinishReason.STOP, "s"),
        replies.usage(USAGE),
    ):
        ChatCompletionChunk.model_validate_json(data[6:], strict=True)


def test_completion_objects_are_what_the_official_client_expects() -> None:
    replies = CompletionReplies(new_head("cmpl-", "m", "fp"), include_usage=True)
    replies.opening(0)
    whole = replies.whole([Choice("a", FinishReason.STOP, 5)], USAGE)
    assert Completion.model_validate_json(whole, strict=True).choices[0].text == "a"
    for data in (replies.finish(0, FinishReason.STOP, "s"), replies.usage(USAGE)):
        Completion.model_validate_json(data[6:], strict=True)
    # OpenAI's own schema says that a chunk's finish_reason is never null, and OpenAI sends null.
    chunk = one_event(replies.text(0, "x"))
    assert chunk["choices"][0].pop("finish_reason") is None
    chunk["choices"][0]["finish_reason"] = "stop"
    Completion.model_validate(chunk, strict=True)
