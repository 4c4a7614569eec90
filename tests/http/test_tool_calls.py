"""Tools over HTTP: what the model is told, and its calls as OpenAI's clients read them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from trio.testing import wait_all_tasks_blocked

from helpers.asgi_client import AsgiClient
from helpers.scripted_engine import ScriptedEngine, delta, open_client
from trioengine.config import ServerConfig
from trioengine.http.app import create_app
from trioengine.http.offload import InlineOffload
from trioengine.outputs import FinishReason
from trioengine.protocol import Add
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from helpers.asgi_client import Call

CHAT = "/v1/chat/completions"
TEACHES_HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)
TEACHES_MISTRAL = "{{ tools }}[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}"
KNOWS_NONE = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"tz": "CET"}}\n</tool_call>'


class World:
    """The app over an engine that says what the test tells it to."""

    def __init__(self, app: Any, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self._api = AsgiClient(app)
        self._tokenizer = tokenizer

    async def answer(self, *texts: str, finish: str = "stop", **body: Any) -> Call:
        """Ask with ``body``, have the engine say ``texts``, return the finished call."""
        fields = {"messages": [{"role": "user", "content": "time?"}], "tools": [TOOL]} | body
        call = self._api.call("POST", CHAT, fields)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run)
            await wait_all_tasks_blocked()
            if not call.finished.is_set():
                request_id = self.engine.added[-1]
                for text in texts:
                    self.engine.say_outputs(delta(request_id, text))
                    await wait_all_tasks_blocked()
                self.engine.say_outputs(delta(request_id, "", FinishReason(finish)))
        return call

    @property
    def read(self) -> str:
        """What the model was last given to read."""
        (*_, add) = (message for message in self.engine.sent if isinstance(message, Add))
        return self._tokenizer.decode(add.prompt_token_ids)

    @property
    def sent(self) -> Add:
        (*_, add) = (message for message in self.engine.sent if isinstance(message, Add))
        return add


@asynccontextmanager
async def world_with(template: str = TEACHES_HERMES, **config: Any) -> AsyncIterator[World]:
    tokenizer = Tokenizer.simulated(2048, chat_template=template)
    engine = ScriptedEngine()
    async with open_client(engine) as client:
        app = create_app(client, lambda: tokenizer, ServerConfig(**config), offload=InlineOffload())
        yield World(app, engine, tokenizer)


async def test_a_call_is_a_call_and_nothing_said(autojump_clock: MockClock) -> None:
    async with world_with() as world:
        call = await world.answer(CALL)
        ChatCompletion.model_validate(call.json, strict=True)
        (choice,) = call.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (made,) = choice["message"]["tool_calls"]
        assert made["type"] == "function"
        assert made["function"] == {"name": "now", "arguments": '{"tz": "CET"}'}
        assert made["id"].startswith("call_")
        assert '"name": "now"' in world.read


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_streamed_it_is_the_same_in_any_pieces(size: int, autojump_clock: MockClock) -> None:
    text = f"Let me see.\n{CALL}\n{CALL.replace('CET', 'UTC')}"
    async with world_with() as world:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        call = await world.answer(*pieces, stream=True)
        chunks = [ChatCompletionChunk.model_validate(event) for event in call.events[:-1]]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(each.content or "" for each in deltas) == "Let me see.\n"
        made = [made for each in deltas for made in each.tool_calls or ()]
        assert [each.index for each in made] == [0, 1]
        assert [each.function.arguments for each in made if each.function] == [
            '{"tz": "CET"}',
            '{"tz": "UTC"}',
        ]
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
            "tool_calls"
        ]


async def test_running_out_of_tokens_wins(autojump_clock: MockClock) -> None:
    async with world_with() as world:
        cut = (await world.answer(CALL, CALL[:30], finish="length")).json["choices"][0]
        assert cut["finish_reason"] == "length"
        assert len(cut["message"]["tool_calls"]) == 1
        assert cut["message"]["content"] == CALL[:30]


async def test_text_stays_text(autojump_clock: MockClock) -> None:
    async with world_with() as world:
        choice = (await world.answer("It is noon.")).json["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It is noon.")
        assert "tool_calls" not in choice["message"]


async def test_without_parallel_calls_there_is_one(autojump_clock: MockClock) -> None:
    async with world_with() as world:
        call = await world.answer(CALL, CALL, parallel_tool_calls=False)
        assert len(call.json["choices"][0]["message"]["tool_calls"]) == 1


async def test_with_the_choice_of_none_the_model_hears_of_none(autojump_clock: MockClock) -> None:
    async with world_with() as world:
        choice = (await world.answer(CALL, tool_choice="none")).json["choices"][0]
        assert choice["message"]["content"] == CALL
        assert "now" not in world.read


async def test_marks_that_are_special_tokens_are_asked_for(autojump_clock: MockClock) -> None:
    async with world_with(TEACHES_MISTRAL) as world:
        call = await world.answer('[TOOL_CALLS]now{"tz": "CET"}')
        assert call.json["choices"][0]["finish_reason"] == "tool_calls"
        assert not world.sent.params.skip_special_tokens
        await world.answer("noon", tools=None)
        assert world.sent.params.skip_special_tokens


async def test_the_operator_may_say_how_calls_are_spelled(autojump_clock: MockClock) -> None:
    async with world_with(tool_call_parser="json") as world:
        call = await world.answer('{"name": "now", "arguments": {}}')
        assert call.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_template_that_knows_no_tools_is_told_in_words(autojump_clock: MockClock) -> None:
    async with world_with(KNOWS_NONE) as world:
        call = await world.answer(CALL)
        assert call.json["choices"][0]["finish_reason"] == "tool_calls"
        assert world.read.startswith("system:You can call functions.")


async def test_what_was_called_is_told_back(autojump_clock: MockClock) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    async with world_with() as world:
        call = await world.answer(
            "noon",
            messages=[
                {"role": "user", "content": "time?"},
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            ],
        )
        assert call.json["choices"][0]["message"]["content"] == "noon"
        assert "tool:12:00" in world.read
        assert '"name": "now"' in world.read


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    body: dict[str, Any], param: str, autojump_clock: MockClock
) -> None:
    async with world_with() as world:
        call = await world.answer(**body)
        assert (call.status, call.error["param"]) == (400, param)
