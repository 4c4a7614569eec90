"""Tools in words, for a template that knows none."""

from __future__ import annotations

from trioengine.http.tools.fallback import with_tools
from trioengine.http.tools.formats import hermes

TOOLS = [{"type": "function", "function": {"name": "now", "description": "The time"}}]
ASKED = {"role": "user", "content": "What time is it?"}


def test_the_tools_are_in_the_system_message() -> None:
    system, asked = with_tools([ASKED], TOOLS)
    assert system["role"] == "system"
    assert '{"name": "now", "description": "The time"}' in system["content"]
    assert asked == ASKED


def test_a_system_message_that_is_there_stays_in_front() -> None:
    system, _ = with_tools([{"role": "system", "content": "Be brief."}, ASKED], TOOLS)
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")


def test_calls_and_results_are_spelled_as_they_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"tz": "é"}}}
    _, _, called, told = with_tools(
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ],
        TOOLS,
    )
    assert "tool_calls" not in called
    (read,) = hermes(called["content"], True).calls
    assert (read.name, read.arguments) == ("now", '{"tz": "é"}')
    assert told == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}


def test_the_example_in_the_words_is_a_call() -> None:
    system, _ = with_tools([ASKED], TOOLS)
    begin = system["content"].index("<tool_call>")
    (read,) = hermes(system["content"][begin:], True).calls
    assert read.name == "FUNCTION"
