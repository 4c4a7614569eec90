"""What a conversation becomes, and where it leaves the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import CHAT, TOKENIZER, open_world
from trioengine.protocol import Add

if TYPE_CHECKING:
    from trio.testing import MockClock

USER = {"role": "user", "content": "hi"}
PREFILL = {"role": "assistant", "content": "Sure, "}
THINKING = (
    "{% for m in messages %}{{ m.role + ':' + m.content.split('</think>')[-1] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is not defined %}<think>\n"
    "{% elif not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def use_template(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(TOKENIZER, "_templates", {"default": source})


async def prompt_text(body: dict[str, Any], **config: Any) -> str:
    async with open_world(**config) as world:
        call = world.start("POST", CHAT, body)
        await world.settle()
        assert world.engine.sent, call.body
        add = world.engine.sent[0]
        assert isinstance(add, Add)
        call.disconnect()
        return TOKENIZER.decode(add.prompt_token_ids)


async def answer(body: dict[str, Any], **config: Any) -> Any:
    async with open_world(running=True, **config) as world:
        call = await world.api.post(CHAT, {"max_tokens": 3} | body)
        return call.events if body.get("stream") else call.json


async def test_a_last_message_can_go_on(autojump_clock: MockClock) -> None:
    body = {"messages": [USER, PREFILL], "continue_final_message": True}
    assert await prompt_text(body) == "user: hi\nassistant: Sure, "
    assert await prompt_text(body | {"add_generation_prompt": False}) == (
        "user: hi\nassistant: Sure, "
    )
    del body["continue_final_message"]
    assert await prompt_text(body) == "user: hi\nassistant: Sure, \nassistant:"


async def test_documents_are_for_a_template_that_knows_them(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [USER], "documents": [{"title": "Rome", "text": "not in a day"}]}
    refused = (await answer(body))["error"]
    assert (refused["param"], refused["code"]) == ("documents", "invalid_value")
    assert await prompt_text(body | {"documents": []}) == "user: hi\nassistant:"
    use_template(monkeypatch, "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}")
    assert await prompt_text(body) == "Rome: not in a day"


async def test_a_message_that_goes_on_is_no_generation_prompt(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, "{{ add_generation_prompt }} {{ messages[-1].content }}")
    body = {"messages": [USER, PREFILL], "continue_final_message": True}
    assert await prompt_text(body) == "False Sure, "


@pytest.mark.parametrize(
    ("messages", "begins"), [([USER, PREFILL], "Sure, "), ([USER], "")], ids=["own", "other"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_repeats_a_last_message_of_the_assistant(
    messages: list[Any], begins: str, stream: bool, autojump_clock: MockClock
) -> None:
    body = {"messages": messages, "echo": True, "stream": stream, "seed": 3}
    if len(messages) == 2:
        body["continue_final_message"] = True
    got = await answer(body)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in got[:-1]]
        text = "".join(delta.get("content", "") for delta in deltas)
    else:
        text = got["choices"][0]["message"]["content"]
    assert text.startswith(begins)
    assert len(text.removeprefix(begins).split()) == 3


async def test_a_template_of_the_request_needs_the_server_s_leave(
    autojump_clock: MockClock,
) -> None:
    body = {"messages": [USER], "chat_template": "[{{ messages[0].content }}]"}
    async with open_world() as world:
        call = await world.api.post(CHAT, body)
        assert (call.status, call.error["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in call.error["message"]
    assert await prompt_text(body, trust_request_chat_template=True) == "[hi]"
    async with open_world(trust_request_chat_template=True) as world:
        for source in ("{% if %}", "{{ 'x' }}" + " " * 65_536):
            call = await world.api.post(CHAT, body | {"chat_template": source})
            assert (call.status, call.error["param"]) == (400, "chat_template")


async def test_arguments_of_the_template(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, "{{ messages[0].content }} {{ reasoning_effort }} {{ mood }}")
    body = {"messages": [USER], "chat_template_kwargs": {"mood": "glad"}}
    assert await prompt_text(body | {"reasoning_effort": "low"}) == "hi low glad"


async def test_a_thought_that_the_prompt_has_begun(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, THINKING)
    message = (await answer({"messages": [USER]}))["choices"][0]["message"]
    assert message["content"] == ""
    assert len(message["reasoning_content"].split()) == 3
    hidden = await answer({"messages": [USER], "include_reasoning": False})
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    events = await answer({"messages": [USER], "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert len(thought.split()) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
        {
            "messages": [{"role": "user", "content": "what is <think>?"}],
            "chat_template_kwargs": {"enable_thinking": True},
        },
        {"messages": [USER, PREFILL], "continue_final_message": True},
        {"messages": [{"role": "user", "content": "<think>"}], "add_generation_prompt": False},
    ],
)
async def test_a_prompt_that_leaves_no_thought_open(
    body: dict[str, Any], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, THINKING)
    message = (await answer(body))["choices"][0]["message"]
    if body.get("add_generation_prompt") is False:
        assert message["reasoning_content"]  # the last that the model reads is an open thought
    else:
        assert len(message["content"].split()) == 3
        assert "reasoning_content" not in message


async def test_a_thought_in_a_message_that_goes_on(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, THINKING)
    for content, inside in [("<think>so ", True), ("<think>so</think> yes", False)]:
        messages = [USER, {"role": "assistant", "content": content}]
        got = await answer({"messages": messages, "continue_final_message": True})
        message = got["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) is inside
        assert bool(message["content"]) is not inside


PREFILLED = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("last", "fields", "thought"),
    [
        (USER, {}, "open"),
        (USER, {"include_reasoning": False}, "open"),
        (USER, {"chat_template_kwargs": {"enable_thinking": False}}, "none"),
        (USER, {"chat_template_kwargs": {"enable_thinking": True}}, "optional"),
        (USER, {"add_generation_prompt": False}, "optional"),
        (PREFILL, PREFILLED, "none"),
        (PREFILL | {"content": "<think>so "}, PREFILLED, "open"),
        (PREFILL | {"content": "<think>"}, PREFILLED, "open"),
        (PREFILL | {"content": "<think>so</think>"}, PREFILLED, "none"),
        (PREFILL | {"content": "<think>so</think>\n\n{"}, PREFILLED, "none"),
    ],
)
@pytest.mark.parametrize("way", ["schema", "regex", "call"])
async def test_a_shape_is_that_of_what_follows_the_thought(
    last: dict[str, str],
    fields: dict[str, Any],
    thought: str,
    way: str,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_template(monkeypatch, THINKING)
    tool = {"type": "function", "function": {"name": "now"}}
    shapes: dict[str, dict[str, Any]] = {
        "schema": {"response_format": {"type": "json_object"}},
        "regex": {"structured_outputs": {"regex": "a+"}},
        "call": {"tools": [tool], "tool_choice": "required"},
    }
    async with open_world() as world:
        call = world.start("POST", CHAT, {"messages": [USER, last], **fields, **shapes[way]})
        await world.settle()
        assert world.engine.sent, call.body
        add = world.engine.sent[0]
        assert isinstance(add, Add)
        assert add.params.structured is not None
        assert add.params.structured.thought == thought
        call.disconnect()


async def test_a_thought_may_be_anything(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, THINKING)
    shape = {"structured_outputs": {"choice": ["yes"]}}
    body = {"messages": [USER], "max_tokens": 6, **shape}
    message = (await answer(body))["choices"][0]["message"]
    assert message["content"] == ""
    assert len(message["reasoning_content"].split()) == 6
    over = body | {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await answer(over))["choices"][0]["message"]["content"] == "yes"


async def test_a_model_that_does_not_think_answers_at_once(autojump_clock: MockClock) -> None:
    body = {"messages": [USER], "structured_outputs": {"choice": ["yes"]}, "max_tokens": 6}
    assert (await answer(body))["choices"][0]["message"]["content"] == "yes"
