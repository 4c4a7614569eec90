"""What the model would read, and what its tokens spell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis.strategies import text

from helpers.api_world import CHAT, TOKENIZER, World, body_for, open_world
from trioengine.http.prompts import MAX_IDS

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "hi there"}]


async def post(path: str, body: Any, **config: Any) -> Call:
    async with open_world(**config) as world:
        return await world.api.post(path, body)


async def test_text_becomes_the_tokens_that_a_completion_would_read(
    autojump_clock: MockClock,
) -> None:
    call = await post(TOKENIZE, {"prompt": "hello wörld"})
    ids = TOKENIZER.encode("hello wörld")
    assert call.json["tokens"] == ids
    assert call.json["count"] == len(ids)
    assert call.json["max_model_len"] == 1024
    assert call.json["token_strs"] is None


async def test_messages_become_what_a_chat_would_read(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        counted = await world.api.post(TOKENIZE, {"messages": MESSAGES})
        chat = await world.api.post(CHAT, {"messages": MESSAGES, "max_tokens": 1})
        assert counted.json["count"] == chat.json["usage"]["prompt_tokens"]
        assert counted.json["tokens"] == TOKENIZER.encode(TOKENIZER.render_chat(MESSAGES))


async def test_the_fields_of_a_chat_count(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        with_prompt = await world.api.post(TOKENIZE, {"messages": MESSAGES})
        without = await world.api.post(
            TOKENIZE, {"messages": MESSAGES, "add_generation_prompt": False}
        )
        assert with_prompt.json["count"] > without.json["count"]


async def test_null_says_nothing(autojump_clock: MockClock) -> None:
    nothing = {"add_special_tokens": None, "return_token_strs": None, "model": None}
    text = await post(TOKENIZE, {"prompt": "a", "messages": None, **nothing})
    assert text.json["tokens"] == TOKENIZER.encode("a")
    chat = await post(TOKENIZE, {"prompt": None, "messages": MESSAGES, **nothing})
    assert chat.json["tokens"] == TOKENIZER.encode(TOKENIZER.render_chat(MESSAGES))


async def test_the_spelling_of_tokens_is_the_vocabularys(autojump_clock: MockClock) -> None:
    call = await post(TOKENIZE, {"prompt": "a é", "return_token_strs": True})
    assert call.json["token_strs"] == ["a", "Ġ", "Ã", "©"]


async def test_tokens_become_their_text_special_ones_too(autojump_clock: MockClock) -> None:
    ids = [*TOKENIZER.encode("né"), TOKENIZER.eos_token_ids[0]]
    call = await post(DETOKENIZE, {"tokens": ids})
    assert call.json["prompt"].startswith("né")
    assert len(call.json["prompt"]) > 2
    assert (await post(DETOKENIZE, {"tokens": []})).json == {"prompt": ""}


@given(words=text(max_size=30))
def test_there_and_back(words: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(words), skip_special_tokens=False) == words


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, "prompt"),
        (TOKENIZE, {"prompt": "\ud800"}, "prompt"),
        (TOKENIZE, {"prompt": None, "messages": None}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": "a"}, "messages"),
        (TOKENIZE, {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": None}, "tokens"),
        (DETOKENIZE, {"tokens": "1"}, "tokens"),
        (DETOKENIZE, {"tokens": [1, "2"]}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens"),
        (DETOKENIZE, {"tokens": [2048]}, "tokens"),
        (DETOKENIZE, {"tokens": [2**70]}, "tokens"),
        (DETOKENIZE, {"tokens": [0] * (MAX_IDS + 1)}, "tokens"),
        (DETOKENIZE, [], None),
    ],
)
async def test_what_is_neither_is_refused_by_name(
    path: str, body: Any, param: str | None, autojump_clock: MockClock
) -> None:
    call = await post(path, json.dumps(body).encode())
    assert (call.status, call.error["type"]) == (400, "invalid_request_error")
    assert call.error["param"] == param


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
async def test_an_unknown_model_is_a_404(path: str, autojump_clock: MockClock) -> None:
    call = await post(path, {"model": "other", "prompt": "a", "tokens": [1]})
    assert (call.status, call.error["code"]) == (404, "model_not_found")


async def test_there_is_a_place_for_it_or_it_is_refused(autojump_clock: MockClock) -> None:
    async with open_world(max_queue_sequences=1) as world:
        busy = world.start("POST", CHAT, body_for(CHAT, max_tokens=3))
        await world.settle()
        full = await world.api.post(TOKENIZE, {"prompt": "a"})
        assert (full.status, full.error["code"]) == (429, "overloaded")
        await _finish(world, busy)
        assert (await world.api.post(TOKENIZE, {"prompt": "a"})).status == 200


async def _finish(world: World, call: Call) -> None:
    await world.run_until_idle()
    assert call.finished.is_set()


async def test_before_a_model_is_there_it_is_a_503(autojump_clock: MockClock) -> None:
    async with open_world(ready=False) as world:
        call = await world.api.post(TOKENIZE, {"prompt": "a"})
        assert (call.status, call.error["code"]) == (503, "starting")
