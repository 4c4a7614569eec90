from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import COMPLETION, body_for, open_world

if TYPE_CHECKING:
    from trio.testing import MockClock

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4,
          "uniqueItems": True}  # fmt: skip


def format_of(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
async def test_an_answer_has_the_shape_asked_for(
    fields: dict[str, Any], stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(CHAT, body_for(CHAT, max_tokens=100, stream=stream, **fields))
        assert call.status == 200, call.body
        if not stream:
            text = json.loads(call.body)["choices"][0]["message"]["content"]
            assert json.loads(text)["a"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "foo**"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: ???"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        ({"response_format": format_of(SCHEMA, name=5)}, "response_format"),
        ({"response_format": format_of({"type": "x"})}, "response_format"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": format_of(UNIQUE)}, "response_format"),
        ({"response_format": format_of(UNIQUE, strict=None)}, "response_format"),
        ({"response_format": format_of(UNIQUE, strict=True)}, "response_format"),
        ({"response_format": format_of({}, strict=0)}, "response_format"),
        ({"response_format": format_of({"type": "x"}, strict=False)}, "response_format"),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs"),
    ],
)
async def test_a_bad_specification_has_a_status_and_a_reason(
    fields: dict[str, Any], param: str, stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(COMPLETION, body_for(COMPLETION, stream=stream, **fields))
        assert (call.status, call.error["param"]) == (400, param), call.body
        assert call.error["message"]
        assert (await world.api.post(COMPLETION, body_for(COMPLETION))).status == 200


async def test_what_need_not_be_strict_is_followed_as_far_as_it_can_be(
    autojump_clock: MockClock,
) -> None:
    async with open_world(running=True) as world:
        body = body_for(CHAT, max_tokens=400, response_format=format_of(UNIQUE, strict=False))
        call = await world.api.post(CHAT, body)
        values = json.loads(call.json["choices"][0]["message"]["content"])
        assert set(values) <= {1, 2}
        assert 2 <= len(values) <= 4


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_answers_has_the_shape(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 100, "stream": stream,
                "response_format": FORMAT}  # fmt: skip
        call = await world.api.post(COMPLETION, body)
        texts = dict.fromkeys(range(4), "")
        for event in call.events[:-1] if stream else [call.json]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert all(json.loads(text)["a"] in (1, 2) for text in texts.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_shape_ends_all_of_its_sequences(
    stream: bool, autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": ["a", "b"], "n": 2, "stream": stream, "guided_regex": "(a"}
        call = await world.api.post(COMPLETION, body)
        assert (call.status, call.error["param"]) == (400, "guided_regex")
        await world.check_nothing_is_left()
