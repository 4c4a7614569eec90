"""A stream, joined, is the answer that is not streamed: every combination, on a real model.

At temperature 0, endpoint by endpoint: n, stop, logprobs, and what shape the answer is to have.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.model]

START_S = 300.0  # a first start fetches and converts the model
COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "description": "Look a city up.", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
PLAIN: dict[str, Any] = {}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETION: {
        "plain": PLAIN,
        "schema": {"response_format": FORMAT},
        "regex": {"structured_outputs": {"regex": "[A-Z][a-z]{2,9}(, [A-Z][a-z]{2,9}){2}"}},
        "choice": {"structured_outputs": {"choice": ["Paris", "Rome"]}},
    },
    CHAT: {
        "plain": PLAIN,
        "schema": {"response_format": FORMAT},
        "object": {"response_format": {"type": "json_object"}},
        "tools": TOOLS,
        "required": TOOLS | {"tool_choice": "required"},
        "named": TOOLS | {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        "none": TOOLS | {"tool_choice": "none"},
    },
    RESPONSES: {
        "plain": PLAIN,
        "schema": {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}},
        "required": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        "auto": {"tools": [{"type": "function", **FUNCTION}]},
    },
}
GRID = [
    (path, shape, n, stop, logprobs)
    for path in (COMPLETION, CHAT)
    for shape, n, stop, logprobs in itertools.product(
        SHAPES[path], [1, 2], [None, [" is", ":"]], [None, 2]
    )
] + [(RESPONSES, shape, 1, None, None) for shape in SHAPES[RESPONSES]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("smollm2-135m-instruct", "--max-model-len", "1024", engine=None) as server:
        yield server.wait_ready(timeout_s=START_S)


def body_of(
    path: str, shape: str, n: int, stop: list[str] | None, logprobs: int | None
) -> dict[str, Any]:
    question = "Which city is the capital of France?"
    fields = {"temperature": 0, **SHAPES[path][shape]}
    if path == RESPONSES:
        return fields | {"input": question, "max_output_tokens": 16}
    fields |= {"n": n, "stop": stop, "max_tokens": 16}
    if path == COMPLETION:
        return fields | {"prompt": [question, "Paris is"], "logprobs": logprobs}
    scores = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    return fields | scores | {"messages": [{"role": "user", "content": question}]}


def events_of(streamed: bytes) -> list[Any]:
    lines = [line[6:] for line in streamed.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def merge(total: dict[str, Any], piece: dict[str, Any]) -> None:
    """Join one chunk's values to what there is: text to text, lists to lists, calls by index."""
    for name, value in piece.items():
        if name == "tool_calls":
            for call in value:
                calls = total.setdefault(name, {})
                merge(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            merge(total.setdefault(name, {}), value)
        elif isinstance(value, list):
            total[name] = (total.get(name) or []) + value
        elif name in ("content", "text", "arguments") and value is not None:
            total[name] = (total.get(name) or "") + value
        elif value is not None:
            total[name] = value


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what is drawn anew each time, and without what is not there."""
    calls = message.get("tool_calls") or []
    if isinstance(calls, dict):
        calls = list(calls.values())
    functions = [call["function"] for call in calls]
    return {"content": message.get("content") or "", "calls": functions}


def told(choice: dict[str, Any]) -> dict[str, Any]:
    text = {"text": choice["text"]} if "text" in choice else bare(choice["message"])
    logprobs = {k: v for k, v in (choice["logprobs"] or {}).items() if v}
    return text | {"logprobs": logprobs} | {k: choice[k] for k in ("finish_reason", "stop_reason")}


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for choice in itertools.chain.from_iterable(event["choices"] for event in events):
        total = choices.setdefault(
            choice["index"], {"logprobs": {}, "finish_reason": None, "stop_reason": None}
        )
        assert total["finish_reason"] is None  # nothing follows the finish
        merge(total, {k: v for k, v in choice.items() if k != "delta"})
        merge(total.setdefault("message", {}) if "delta" in choice else {}, choice.get("delta", {}))
    return {index: told(choice) for index, choice in choices.items()}


def spoken(items: list[Any]) -> list[tuple[str, Any]]:
    """Return what the items of a response say: text, or a call's name and arguments."""
    return [
        ("call", (item["name"], item["arguments"]))
        if item["type"] == "function_call"
        else ("text", "".join(part["text"] for part in item["content"]))
        for item in items
    ]


def deltas(events: list[Any]) -> list[str]:
    """Return the deltas of each item of a streamed response, joined."""
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            texts[at] = texts.get(at, "") + event["delta"]
    return [texts[at] for at in sorted(texts)]


@pytest.mark.parametrize(("path", "shape", "n", "stop", "logprobs"), GRID)
def test_a_stream_joins_to_the_whole_answer(
    server: ServerProcess,
    path: str,
    shape: str,
    n: int,
    stop: list[str] | None,
    logprobs: int | None,
) -> None:
    body = body_of(path, shape, n, stop, logprobs)
    status, whole = server.post(path, body)
    assert status == 200, whole
    _, streamed = server.request("POST", path, body | {"stream": True})
    events = events_of(streamed)
    if path == RESPONSES:
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        assert last["response"]["status"] == whole["status"]
        assert spoken(last["response"]["output"]) == spoken(whole["output"])
        said = [value if kind == "text" else value[1] for kind, value in spoken(whole["output"])]
        assert deltas(events) == said
    else:
        assert joined(events) == {choice["index"]: told(choice) for choice in whole["choices"]}
        assert len(whole["choices"]) == n * (2 if path == COMPLETION else 1)
