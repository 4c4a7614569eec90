"""Parameters through the whole server in memory: what is asked for reaches the answer."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.api_world import CHAT, COMPLETION, PATHS, TOKENIZER, body_for, open_world
from helpers.openai_shapes import strictly
from helpers.told_tokens import SEEDED, counts, joined, told
from trioengine.protocol import Add

if TYPE_CHECKING:
    from pydantic import BaseModel
    from trio.testing import MockClock


WHOLE: dict[str, type[BaseModel]] = {COMPLETION: Completion, CHAT: ChatCompletion}
CHUNK: dict[str, type[BaseModel]] = {COMPLETION: Completion, CHAT: ChatCompletionChunk}


def score_fields(path: str, logprobs: int | None) -> dict[str, Any]:
    if logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}


GRID = list(
    itertools.product(
        PATHS,
        [1, 3],  # n
        [None, "a", [" b", "zu"]],  # stop
        [None, 0, 2],  # logprobs
        [False, True],  # echo
        [False, True],  # include_usage
    )
)


async def test_a_stream_joins_to_the_whole_answer(autojump_clock: MockClock) -> None:
    """Every combination, in one world: what was asked before must not matter."""
    async with open_world(running=True, script=SEEDED) as world:
        for path, n, stop, logprobs, echo, usage in GRID:
            fields = {"n": n, "stop": stop, "echo": echo, "seed": 11, "max_tokens": 9,
                      "temperature": 0} | score_fields(path, logprobs)  # fmt: skip
            body = body_for(path, "hello", **fields)
            if path == COMPLETION and n == 3:
                body["prompt"] = ["hello", "you two"]
            whole = (await world.api.post(path, body)).json
            strictly(WHOLE[path], whole)
            options = {"stream_options": {"include_usage": True}} if usage else {}
            streamed = await world.api.post(path, body | {"stream": True} | options)
            *events, done = streamed.events
            assert done == "[DONE]"
            for event in events:
                strictly(CHUNK[path], event)
            assert joined(events, path) == told(whole, path), fields
            if usage:
                assert events[-1]["choices"] == []
                assert counts(events[-1]["usage"]) == counts(whole["usage"])
            assert all(("usage" in event) is usage for event in events)


@pytest.mark.parametrize("path", PATHS)
async def test_usage_so_far_on_every_chunk(path: str, autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = body_for(path, max_tokens=4, stream=True, stream_options=options)
        call = await world.api.post(path, body)
        usages = [counts(event["usage"])[1] for event in call.events[:-1]]
        assert usages == sorted(usages)
        assert usages[-1] == 4
        assert usages[0] == 1
        options["include_usage"] = False
        call = await world.api.post(path, body)
        assert all("usage" not in event for event in call.events[:-1])


LIMITS: list[dict[str, Any]] = [
    {"n": 129}, {"best_of": 129}, {"stop": ["a"] * 5}, {"stop": "a" * 257},
    {"bad_words": ["a"] * 129},
    {"bad_words": ["a" * 257]}, {"logit_bias": {str(i): 1 for i in range(1025)}}, {"logprobs": 21},
    {"logit_bias": {"99999": 1}}, {"allowed_token_ids": [99999]}, {"stop_token_ids": [99999]},
    {"temperature": 2.1}, {"top_p": 0}, {"min_p": 2}, {"top_k": -2}, {"max_tokens": 0},
    {"min_tokens": -1}, {"min_tokens": 17}, {"presence_penalty": 3}, {"frequency_penalty": -3},
    {"repetition_penalty": 0}, {"prompt_logprobs": 21}, {"truncate_prompt_tokens": 0},
    {"truncation_side": "middle"}, {"seed": 2**63}, {"priority": 2**40}, {"timeout": 0},
    {"prompt": ["a"] * 2049}, {"suffix": "x"},
]  # fmt: skip


@pytest.mark.parametrize("fields", LIMITS, ids=lambda fields: next(iter(fields)))
async def test_a_value_out_of_bounds_is_refused_before_anything_is_tokenised(
    fields: dict[str, Any], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    async with open_world(max_queue_sequences=4096) as world:
        call = await world.api.post(COMPLETION, {"prompt": "a"} | fields)
        (name,) = fields
        assert (call.status, call.error["param"]) == (400, name)
        assert name in call.error["message"]
        assert not world.engine.sent


async def sent(path: str, **fields: Any) -> Add:
    """The first message that reaches the engine."""
    async with open_world() as world:
        call = world.start("POST", path, body_for(path) | fields)
        await world.settle()
        assert world.engine.sent, call.body
        add = world.engine.sent[0]
        assert isinstance(add, Add)
        call.disconnect()
        return add


@pytest.mark.parametrize("path", PATHS)
async def test_values_reach_the_engine(path: str, autojump_clock: MockClock) -> None:
    fields = {
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
        "allowed_token_ids": [5, 6, 5], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "min_tokens": 2, "cache_salt": "mine",
    }  # fmt: skip
    params = (await sent(path, logit_bias={"7": -100}, max_tokens=4, **fields)).params
    for name, value in (fields | {"allowed_token_ids": (5, 6)}).items():
        assert getattr(params, name) == value
    assert params.logit_bias == {7: -100.0}
    assert params.logprobs is None
    assert params.prompt_logprobs is None


@pytest.mark.parametrize("path", PATHS)
async def test_bad_words_are_told_as_tokens_with_and_without_a_space(
    path: str, autojump_clock: MockClock
) -> None:
    word = TOKENIZER.decode([300])  # with its space it is one token
    params = (await sent(path, bad_words=[word, "b"])).params
    encode = TOKENIZER.encode
    assert params.bad_words_token_ids == (tuple(encode(word.lstrip())), (encode("b")[0],))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": 1000}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 24}, slice(-1000, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, slice(-1023, None)),
    ],
)
async def test_a_prompt_is_cut_at_its_start(
    fields: dict[str, Any], kept: slice, autojump_clock: MockClock
) -> None:
    ids = [index % 2000 + 1 for index in range(1500 if -1 in fields.values() else 30)]
    assert (await sent(COMPLETION, prompt=ids, **fields)).prompt_token_ids == ids[kept]


async def test_a_chat_is_cut_too(autojump_clock: MockClock) -> None:
    ids = (await sent(CHAT, truncate_prompt_tokens=4)).prompt_token_ids
    assert TOKENIZER.decode(ids) == "ant:"


async def test_the_index_is_prompt_times_n_plus_k(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": ["x", "y"], "n": 2, "echo": True, "max_tokens": 1}
        choices = (await world.api.post(COMPLETION, body)).json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"][0] for choice in choices] == ["x", "x", "y", "y"]


async def test_best_of_gives_n_and_counts_all(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": ["x", "y"], "n": 2, "best_of": 3, "max_tokens": 5}
        answer = (await world.api.post(COMPLETION, body)).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert counts(answer["usage"]) == [2, 2 * 3 * 5, 32]


async def test_logprobs_are_one_for_each_token(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = body_for(CHAT, max_tokens=7, logprobs=True, top_logprobs=3)
        (choice,) = (await world.api.post(CHAT, body)).json["choices"]
        content = choice["logprobs"]["content"]
        assert "".join(item["token"] for item in content) == choice["message"]["content"]
        assert [item["logprob"] for item in content] == pytest.approx([-math.log(2)] * 7)
        assert all(len(item["top_logprobs"]) == 3 for item in content)
        spelled = bytes(itertools.chain.from_iterable(item["bytes"] for item in content))
        assert spelled.decode() == choice["message"]["content"]


@pytest.mark.parametrize("echo", [True, False])
async def test_offsets_find_the_tokens_in_the_text(echo: bool, autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": "a é😀", "max_tokens": 5, "logprobs": 0, "echo": echo}
        (choice,) = (await world.api.post(COMPLETION, body)).json["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert text.startswith(token, at) or token == "\ufffd"
        assert logprobs["text_offset"][0] == 0


async def test_ids_in_place_of_texts(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        fields: dict[str, Any] = {
            "max_tokens": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        body = {"prompt": [5, 6], "logprobs": 1} | fields
        (choice,) = (await world.api.post(COMPLETION, body)).json["choices"]
        assert choice["prompt_token_ids"] == [5, 6]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        answer = (await world.api.post(CHAT, body_for(CHAT, logprobs=True, **fields))).json
        assert TOKENIZER.decode(answer["prompt_token_ids"]) == "user: hello\nassistant:"
        ids = [item["token"] for item in answer["choices"][0]["logprobs"]["content"]]
        assert ids == [f"token_id:{i}" for i in answer["choices"][0]["token_ids"]]
        streamed = await world.api.post(COMPLETION, body | {"stream": True})
        chunks = [event["choices"][0] for event in streamed.events[:-1]]
        assert [c.get("prompt_token_ids") for c in chunks] == [[5, 6]] + [None] * (len(chunks) - 1)
        told_ids = [i for c in chunks for i in c.get("token_ids", [])]
        assert len(told_ids) == 2


async def test_prompt_logprobs(autojump_clock: MockClock) -> None:
    async with open_world(running=True) as world:
        body = {"prompt": [[5, 6], [7]], "max_tokens": 1, "prompt_logprobs": 1}
        first, second = (await world.api.post(COMPLETION, body)).json["choices"]
        assert first["logprobs"] is None
        assert first["prompt_logprobs"][0] is None
        own = first["prompt_logprobs"][1]["6"]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert len(first["prompt_logprobs"][1]) == 2
        assert second["prompt_logprobs"] == [None]
