"""Tool calls in text: what each format reads, and that it reads the same in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trioengine.http.tools.formats import FORMATS, Call, Reading, detect_format

ARGUMENTS = {"city": "Zürich </tool_call>", "n": [1, {"x": None}], "q": 'a "b" \\ [TOOL_CALLS]'}
SPELLED = json.dumps(ARGUMENTS, ensure_ascii=False)
WEATHER = Call("get_weather", SPELLED)
NOW = Call("now", "{}")


def call(arguments: str = SPELLED, key: str = "arguments", name: str = "get_weather") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


PLAIN = '{"city": "Rome"}'
ROME = Call("get_weather", PLAIN)
NOW_CALL = call("{}", name="now")

READ = [
    ("hermes", "Just text.", Reading("Just text.", ())),
    ("hermes", f"<tool_call>\n{call(PLAIN)}\n</tool_call>", Reading("", (ROME,))),
    (
        "hermes",
        f"Look.\n<tool_call>{call(PLAIN)}</tool_call>\n<tool_call>{NOW_CALL}</tool_call>\n",
        Reading("Look.\n", (ROME, NOW)),
    ),
    ("hermes", f"<tool_call>[{call(PLAIN)}]</tool_call>", Reading("", (ROME,))),
    ("hermes", "<tool_call>{}</tool_call>", Reading("<tool_call>{}</tool_call>", ())),
    ("hermes", f"<tool_call>{call(PLAIN)}", Reading(f"<tool_call>{call(PLAIN)}", ())),
    ("hermes", "a < b <tool", Reading("a < b <tool", ())),
    ("mistral", f"[TOOL_CALLS] [{call()}, {call('{}', name='now')}]", Reading("", (WEATHER, NOW))),
    ("mistral", f"Hm. [TOOL_CALLS]get_weather{PLAIN}", Reading("Hm. ", (ROME,))),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{PLAIN}[TOOL_CALLS]now{{}}",
        Reading("", (ROME, NOW)),
    ),
    ("mistral", "[TOOL_CALLS] [{]", Reading("[TOOL_CALLS] [{]", ())),
    ("llama3_json", call(key="parameters"), Reading("", (WEATHER,))),
    ("llama3_json", f"<|python_tag|>{call(PLAIN, 'parameters')}", Reading("", (ROME,))),
    (
        "llama3_json",
        f"{call(PLAIN, 'parameters')}; {call('{}', 'parameters', 'now')}",
        Reading("", (ROME, NOW)),
    ),
    ("json", f"[{call()}, {call('{}', name='now')}]", Reading("", (WEATHER, NOW))),
    ("json", '{"answer": 42}', Reading('{"answer": 42}', ())),
    ("json", "  no call", Reading("  no call", ())),
    ("json", f"{call(PLAIN)} and more", Reading("and more", (ROME,))),
    ("json", call('"{\\"city\\": \\"Rome\\"}"'), Reading("", (ROME,))),
    ("json", call("null", name="now"), Reading("", (NOW,))),
    ("json", '{"name": "f", "arguments": [1]}', Reading('{"name": "f", "arguments": [1]}', ())),
    ("json", '{"name": "", "arguments": {}}', Reading('{"name": "", "arguments": {}}', ())),
    ("json", "", Reading("", ())),
]


@pytest.mark.parametrize(("name", "text", "expected"), READ)
def test_what_a_format_reads(name: str, text: str, expected: Reading) -> None:
    assert FORMATS[name](text, True) == expected
    assert all(isinstance(json.loads(found.arguments), dict) for found in expected.calls)


@pytest.mark.parametrize(("name", "text", "expected"), READ)
def test_what_is_certain_only_grows(name: str, text: str, expected: Reading) -> None:
    """At every split point: what was said stays said, and the end adds the rest."""
    before = Reading("", ())
    for end in range(len(text) + 1):
        now = FORMATS[name](text[:end], False)
        assert now.content.startswith(before.content)
        assert now.calls[: len(before.calls)] == before.calls
        before = now
    assert expected.content.startswith(before.content)
    assert expected.calls[: len(before.calls)] == before.calls


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "[", "]",
    ";", ",", " ", "\n", "<", "tool", "x", call(PLAIN), call("{}", "parameters", "now"), "name{}",
]  # fmt: skip


@given(name=st.sampled_from(sorted(FORMATS)), parts=st.lists(st.sampled_from(PARTS), max_size=10))
@example(name="hermes", parts=[" ", "<tool_call>", call(PLAIN), "</tool_call>", "\n", "x"])
@example(name="mistral", parts=["x", "[TOOL_CALLS]", "name{}", "[TOOL_CALLS]", "{"])
@example(name="mistral", parts=[" ", "[TOOL_CALLS]", call(PLAIN)])
@example(name="json", parts=[call(PLAIN), ",", "x"])
def test_any_text_reads_the_same_in_any_pieces(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    read, final = FORMATS[name], FORMATS[name](text, True)
    before = Reading("", ())
    for end in range(len(text) + 1):
        now = read(text[:end], False)
        assert now.content.startswith(before.content)
        assert now.calls[: len(before.calls)] == before.calls
        before = now
    assert final.content.startswith(before.content)
    assert final.calls[: len(before.calls)] == before.calls


@given(name=st.sampled_from(sorted(FORMATS)), text=st.text(alphabet="ab \n.!é", max_size=40))
def test_text_without_marks_is_content(name: str, text: str) -> None:
    assert FORMATS[name](text, True) == Reading(
        text if text.strip() or name != "hermes" else "", ()
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools }} ipython", "llama3_json"),
        ("{{ tools }}", "json"),
    ],
)
def test_the_template_tells_the_format(template: str, expected: str | None) -> None:
    assert detect_format(lambda word: word in template) == expected
