"""``/v1/responses`` over HTTP, read by the official client's own types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Raw
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from helpers.api_world import open_world
from trioengine.errors import InvalidRequestError
from trioengine.http.responses.request import ResponseRequest, as_chat

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call
    from trioengine.http.schemas import ChatMessage

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GREEDY = {"temperature": 0, "ignore_eos": True}
SCHEMA = {
    "type": "json_schema",
    "name": "one",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def events_of(call: Call) -> list[Any]:
    """Return the events, each as the client's type, their names and numbers checked."""
    found = []
    for number, frame in enumerate(call.body.decode().strip().split("\n\n")):
        name, data = frame.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        assert event.sequence_number == number
        found.append(event)
    return found


async def post(**body: Any) -> Call:
    async with open_world(running=True) as world:
        return await world.api.post(PATH, GREEDY | body)


async def test_a_text_is_answered_by_a_message(autojump_clock: MockClock) -> None:
    call = await post(input="hello", max_output_tokens=5, instructions="Be brief.", user="u")
    response = Response.model_validate(call.json, strict=False)
    assert call.status == 200
    assert response.status == "incomplete"
    assert call.json["store"] is False
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 5)


async def test_a_stream_joins_to_the_whole(autojump_clock: MockClock) -> None:
    whole = Response.model_validate((await post(input="hello", max_output_tokens=9)).json)
    events = events_of(await post(input="hello", max_output_tokens=9, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1


async def test_the_end_of_the_sequence_is_completed(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"input": "hello", "temperature": 0, "max_output_tokens": 1000}
        call = await world.api.post(PATH, body)
        assert call.json["status"] in {"completed", "incomplete"}
        streamed = await world.api.post(PATH, body | {"stream": True})
        assert events_of(streamed)[-1].response.status == call.json["status"]


async def test_a_stream_that_fails_ends_with_an_error_event(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", PATH, {"input": "a", "stream": True, "max_output_tokens": 50})
        await world.turn(2)
        world.client.abort_all("shutdown")
        await world.settle()
        failed, last = events_of(call)[-2:]
        assert (last.type, last.code) == ("error", "draining")
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error is not None
        assert failed.response.error.message == last.message


async def test_it_can_be_cancelled_by_its_id(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = world.start("POST", PATH, {"input": "a", "stream": True, "max_output_tokens": 500})
        await world.turn(2)
        response_id = events_of(call)[0].response.id
        ending = world.start("POST", f"/v1/requests/{response_id}/cancel")
        await world.turn()
        assert ending.status == 200
        assert events_of(call)[-1].code == "cancelled"


async def test_a_text_has_the_format_that_was_asked_for(autojump_clock: MockClock) -> None:
    asked = {"format": SCHEMA, "verbosity": "low"}
    call = await post(input="hello", max_output_tokens=100, text=asked)
    whole = Response.model_validate(call.json)
    assert json.loads(whole.output_text)["a"] in (1, 2)
    assert whole.status == "completed"
    assert call.json["text"] == asked
    last = events_of(await post(input="hello", max_output_tokens=100, text=asked, stream=True))[-1]
    assert last.response.text == whole.text
    assert last.response.output_text == whole.output_text


async def test_any_object_is_a_format_too(autojump_clock: MockClock) -> None:
    text = {"format": {"type": "json_object"}}
    call = await post(input="hello", max_output_tokens=100, text=text, temperature=1)
    assert call.json["output"][0]["content"][0]["text"].startswith("{")
    assert call.json["text"] == text
    assert (await post(input="hello", max_output_tokens=1)).json["text"] == {
        "format": {"type": "text"}
    }


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be "),
        ({"input": []}, "input", "'input' takes "),
    ],
)
async def test_a_complaint_has_the_names_that_the_client_used(
    asked: dict[str, Any], param: str, message: str, autojump_clock: MockClock
) -> None:
    call = await post(**({"input": "hello"} | asked))
    assert (call.status, call.error["param"]) == (400, param)
    assert message in call.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_that_cannot_be_had_is_refused(
    stream: bool, autojump_clock: MockClock
) -> None:
    schema = {"type": "array", "uniqueItems": True}
    for strict in (True, None):
        told = SCHEMA | {"schema": schema, "strict": strict}
        call = await post(input="hello", text={"format": told}, stream=stream)
        assert (call.status, call.error["param"]) == (400, "text.format"), call.body
        assert "uniqueItems" in call.error["message"]
    told = SCHEMA | {"schema": schema | {"maxItems": 0, "minItems": 0}, "strict": False}
    call = await post(input="hello", text={"format": told}, stream=stream)
    assert call.status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "message"}]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0]"),
        ({"input": "a", "metadata": {str(i): "v" for i in range(30_000)}}, "metadata"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "a", "text": {"format": SCHEMA | {"name": None}}}, "text.format.name"),
        ({"input": "a", "text": {"format": SCHEMA | {"strict": 1}}}, "text.format.strict"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "a", "top_logprobs": 1}, "top_logprobs"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "a", "include": ["thoughts"]}, "include[0]"),
        ({"input": "a", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": "a", "reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"input": "a", "stop": ""}, "stop"),
        (
            {
                "input": "a",
                "structured_outputs": {"choice": ["b"]},
                "text": {"format": {"type": "json_object"}},
            },
            "structured_outputs",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    body: dict[str, Any], param: str, autojump_clock: MockClock
) -> None:
    # Its engine runs, so that what is let pass by mistake has an answer.
    async with open_world(running=True) as world:
        call = await world.api.post(PATH, {"max_output_tokens": 1} | body)
        assert (call.status, call.error["param"]) == (400, param)
        assert param == "messages" or "'messages'" not in call.error["message"]


async def test_what_asks_for_nothing_else_is_let_pass(autojump_clock: MockClock) -> None:
    said = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "tool_choice": "auto",
        "top_logprobs": 0,
        "n": 1,
        "prompt": None,
    }
    assert (await post(input="a", max_output_tokens=2, **said)).status == 200
    streamed = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert (await post(input="a", max_output_tokens=2, **streamed)).status == 200


async def test_sampling_is_as_in_a_chat(autojump_clock: MockClock) -> None:
    shape = {"choice": ["blue"]}
    call = await post(input="a", max_output_tokens=20, structured_outputs=shape, ignore_eos=False)
    assert Response.model_validate(call.json).output_text == "blue"
    whole = Response.model_validate((await post(input="a", max_output_tokens=20)).json)
    stop = whole.output_text[4:7]
    cut = Response.model_validate((await post(input="a", max_output_tokens=20, stop=stop)).json)
    assert cut.output_text == whole.output_text[: whole.output_text.index(stop)]
    assert cut.status == "completed"


# The chat that is meant -------------------------------------------------------------------------


def chat(**body: Any) -> list[ChatMessage]:
    import msgspec

    return as_chat(msgspec.convert(body, ResponseRequest)).messages


def test_items_become_turns() -> None:
    messages = chat(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "time?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ],
    )
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool"]
    called = messages[2]
    assert called.content == "Let me see."
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.name == "now"
    assert (messages[3].content, messages[3].tool_call_id) == ("noon", "c1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "m"),
        ("stream", True),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.1),
        ("seed", 7),
        ("stop", ["x"]),
        ("stop_token_ids", [5]),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.5),
        ("logit_bias", {5: 1.0}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("structured_outputs", Raw(b'{"choice": ["a"]}')),
        ("chat_template_kwargs", Raw(b'{"a": 1}')),
        ("cache_salt", "x"),
        ("priority", 2),
        ("timeout", 3.0),
        ("parallel_tool_calls", False),
    ],
)
def test_what_a_chat_knows_too_means_the_same(name: str, value: object) -> None:
    asked = as_chat(ResponseRequest(input="a", **{name: value}))  # type: ignore[arg-type]
    assert getattr(asked, name) == value


def test_functions_are_flat_here() -> None:
    import msgspec

    tool = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
    body = {"input": "a", "tools": [tool], "tool_choice": {"type": "function", "name": "now"}}
    asked = as_chat(msgspec.convert(body, ResponseRequest))
    assert asked.tools is not None
    assert asked.tools[0].function.name == "now"
    with pytest.raises(InvalidRequestError):
        as_chat(msgspec.convert({"input": []}, ResponseRequest))
