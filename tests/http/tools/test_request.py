"""What a chat request may say of tools."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from trioengine.errors import InvalidRequestError
from trioengine.http.tools.request import NamedChoice, Tool, ToolUse, calls_schema, read_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **fields: Any) -> Tool:
    return msgspec.convert({"type": "function", "function": {"name": name, **fields}}, Tool)


def named(name: str) -> NamedChoice:
    return msgspec.convert({"type": "function", "function": {"name": name}}, NamedChoice)


WEATHER, NOW = tool("get_weather", parameters=CITY), tool("now", description="The time")


def test_what_the_client_did_not_say_is_not_there() -> None:
    use = read_tools([WEATHER, NOW], None, None)
    assert use is not None
    assert use.for_template() == [
        {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "now", "description": "The time"}},
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, ToolUse(tools=[WEATHER, NOW], parallel=True)),
        ("auto", False, ToolUse(tools=[WEATHER, NOW], parallel=False)),
        ("none", None, None),
        ("required", None, ToolUse(tools=[WEATHER, NOW], parallel=True, forced=[WEATHER, NOW])),
        (
            named("now"),
            True,
            ToolUse(tools=[WEATHER, NOW], parallel=False, forced=[NOW], named=True),
        ),
    ],
)
def test_choices(choice: Any, parallel: bool | None, expected: ToolUse | None) -> None:
    assert read_tools([WEATHER, NOW], choice, parallel) == expected


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "auto", "tools"),
        ([], None, "tools"),
        (None, "required", "tool_choice"),
        ([NOW], named("later"), "tool_choice"),
        ([], "none", "tools"),
        ([NOW, NOW], None, "tools[1].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool(f"f{number}") for number in range(129)], None, "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools, choice, None)
    assert caught.value.param == param


def test_no_tools_are_no_use() -> None:
    assert read_tools(None, None, None) is None


def test_the_schema_of_forced_calls() -> None:
    use = read_tools([WEATHER, NOW], "required", None)
    assert use is not None
    schema = json.loads(calls_schema(use))
    assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, 16)
    weather, now = schema["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "get_weather"}
    assert weather["properties"]["arguments"] == {"$ref": "#/$defs/0"}
    assert schema["$defs"] == {"0": CITY, "1": {"type": "object"}}
    assert weather["required"] == ["name", "arguments"]
    assert weather["additionalProperties"] is False
    assert now["properties"]["arguments"] == {"$ref": "#/$defs/1"}
    one = read_tools([WEATHER, NOW], "required", False)
    assert one is not None
    assert json.loads(calls_schema(one))["maxItems"] == 1


def test_what_a_function_takes_may_refer_to_itself() -> None:
    inner = {"$id": "https://example.com/x", "$ref": "#/y"}
    takes = {
        "properties": {
            "a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#"}, "c": inner, "$ref": {"$ref": "else#/a"},
            "d": {"anyOf": [{"$ref": "#/$defs/a"}], "const": {"$ref": "#/z"}},
        },
        "$defs": {"a": {"type": "null"}},
    }  # fmt: skip
    use = read_tools([tool("f", parameters=takes)], "required", None)
    assert use is not None
    assert json.loads(calls_schema(use))["$defs"]["0"] == {
        "properties": {
            "a": {"$ref": "#/$defs/0/$defs/a"}, "b": {"$ref": "#/$defs/0"}, "c": inner,
            "$ref": {"$ref": "else#/a"},
            "d": {"anyOf": [{"$ref": "#/$defs/0/$defs/a"}], "const": {"$ref": "#/z"}},
        },
        "$defs": {"a": {"type": "null"}},
    }  # fmt: skip


def test_what_a_function_takes_may_be_too_deep() -> None:
    takes: dict[str, Any] = {}
    for _ in range(3000):
        takes = {"not": takes}
    use = read_tools([tool("f", parameters=takes)], "required", None)
    assert use is not None
    with pytest.raises(InvalidRequestError) as caught:
        calls_schema(use)
    assert caught.value.param == "tools"
