from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.api_world import CHAT, TOKENIZER, body_for, open_world
from trioengine.protocol import Add

if TYPE_CHECKING:
    from trio.testing import MockClock


async def prompt_text(body: dict[str, Any]) -> str:
    """The text that reaches the engine for this body."""
    async with open_world() as world:
        call = world.start("POST", CHAT, body)
        await world.settle()
        assert world.engine.sent, call.body
        (add,) = world.engine.sent
        assert isinstance(add, Add)
        call.disconnect()
        return TOKENIZER.decode(add.prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "hi"}], "user: hi\nassistant:"),
        (
            [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "42", "tool_call_id": "c"},
            ],
            "system: be brief\nuser: a\nassistant: \ntool: 42\nassistant:",
        ),
    ],
)
async def test_messages_go_through_the_template(
    messages: list[dict[str, Any]], text: str, autojump_clock: MockClock
) -> None:
    assert await prompt_text({"messages": messages}) == text


async def test_no_generation_prompt(autojump_clock: MockClock) -> None:
    body = body_for(CHAT, "hi", add_generation_prompt=False)
    assert await prompt_text(body) == "user: hi\n"


async def test_an_answer_is_what_the_official_client_expects(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        whole = await world.api.post(CHAT, body_for(CHAT, n=2, max_tokens=3))
        ChatCompletion.model_validate_json(whole.body, strict=True)
        assert whole.json["id"].startswith("chatcmpl-")
        options = {"include_usage": True}
        body = body_for(CHAT, n=2, max_tokens=3, stream=True, stream_options=options)
        streamed = await world.api.post(CHAT, body)
        chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in streamed.events[:-1]]
        assert len({chunk.id for chunk in chunks}) == 1
        first = {c.index: c.delta for chunk in reversed(chunks) for c in chunk.choices}
        assert {delta.role for delta in first.values()} == {"assistant"}
        assert len(first) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a"] * 500_000}, "stop"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_named(
    fields: dict[str, Any], param: str, autojump_clock: MockClock
) -> None:
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT) | fields)
        assert (call.status, call.error["param"]) == (400, param)
        assert not world.engine.sent


async def test_values_that_change_nothing_are_accepted(autojump_clock: MockClock) -> None:
    fields = {
        "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tools": None,
        "tool_choice": "none", "parallel_tool_calls": True, "user": "u", "metadata": {"a": "b"},
        "store": True, "service_tier": "auto", "seed": None, "stop": None, "functions": None,
        "chat_template_kwargs": {}, "frobnicate": [1, {"a": 2}],
    }  # fmt: skip
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, max_tokens=1) | fields)
        assert call.status == 200, call.body


async def test_a_template_that_refuses_is_a_400(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(TOKENIZER, "_templates", {"default": source})
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT))
        assert (call.status, call.error["param"]) == (400, "messages")
        assert "roles must alternate" in call.error["message"]


async def test_without_a_template_the_flag_is_named(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "_templates", {})
    async with open_world() as world:
        call = await world.api.post(CHAT, body_for(CHAT))
        assert call.status == 400
        assert "--chat-template" in call.error["message"]


@pytest.mark.parametrize(
    ("spare", "max_tokens", "status"),
    [(0, None, 400), (1, None, 200), (1, 1, 200), (1, 2, 400), (2, 2, 200), (-1, None, 400)],
)
async def test_the_limit_is_exact(
    spare: int, max_tokens: int | None, status: int, autojump_clock: MockClock
) -> None:
    """``spare`` tokens are left in a context of 1024 after the prompt."""
    overhead = len("user: \nassistant:")
    text = "x" * (1024 - overhead - spare)
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, text, max_tokens=max_tokens))
        assert call.status == status, call.body
        if status == 400:
            assert call.error["code"] == "context_length_exceeded"
            assert call.error["param"] == "messages"
            for number in (1024, 1024 - spare, max_tokens or 1):
                assert f" {number} " in call.error["message"]
