from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import body_for, open_world

if TYPE_CHECKING:
    from trio.testing import MockClock

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("one", "two")
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"one", "two"}), ({"type": "function", "function": {"name": "two"}}, {"two"})],
)
async def test_a_forced_call_is_made(
    choice: Any, names: set[str], autojump_clock: MockClock
) -> None:
    async with open_world(running=True) as world:
        call = await world.api.post(
            CHAT,
            body_for(CHAT, tools=TOOLS, tool_choice=choice, max_tokens=400,
                     parallel_tool_calls=False),
        )  # fmt: skip
        assert call.status == 200, call.body
        choice_made = json.loads(call.body)["choices"][0]
        [made] = choice_made["message"]["tool_calls"]
        assert made["function"]["name"] in names
        assert json.loads(made["function"]["arguments"])["n"] in (1, 2)
        both = body_for(CHAT, tools=TOOLS, tool_choice=choice, guided_regex="a")
        refused = await world.api.post(CHAT, both)
        assert (refused.status, refused.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(("strict", "status"), [(True, 400), (False, 200), (None, 200)])
async def test_a_strict_function_is_called_to_the_letter_or_refused(
    strict: bool | None, status: int, autojump_clock: MockClock
) -> None:
    unique = {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "maxItems": 2}
    function = {"name": "one", "strict": strict, "parameters": {
        "type": "object", "properties": {"n": unique}, "additionalProperties": False,
    }}  # fmt: skip
    tools = [{"type": "function", "function": function}]
    async with open_world(running=True) as world:
        body = body_for(CHAT, tools=tools, tool_choice="required", max_tokens=400)
        call = await world.api.post(CHAT, body)
        assert call.status == status, call.body
        if status == 400:
            assert call.error["param"] == "tools"
            assert "uniqueItems" in call.error["message"]
