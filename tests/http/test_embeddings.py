"""Text or ids to vectors over HTTP: shapes, order, limits, and what ends a request early."""

from __future__ import annotations

import array
import base64
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from helpers.api_world import CHAT, COMPLETION, TOKENIZER, body_for, open_world
from helpers.embedding_engine import MAX_LEN, LengthEmbedder, open_embedding_world, vector_of

if TYPE_CHECKING:
    from trio.testing import MockClock

    from helpers.asgi_client import Call

PATH = "/v1/embeddings"


async def embed(runner: LengthEmbedder | None = None, **body: Any) -> Call:
    async with open_embedding_world(runner, running=True) as world:
        return await world.api.post(PATH, json.dumps(body).encode())


def vectors(call: Call) -> list[Any]:
    assert [entry["index"] for entry in call.json["data"]] == list(range(len(call.json["data"])))
    return [entry["embedding"] for entry in call.json["data"]]


async def test_a_text_becomes_a_vector(autojump_clock: MockClock) -> None:
    call = await embed(input="hello")
    ids = TOKENIZER.encode("hello")
    assert call.json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of(ids)}],
        "model": "m",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", "bc"], [TOKENIZER.encode("a"), TOKENIZER.encode("bc")]),
    ],
)
async def test_every_kind_of_input_in_order(
    given: Any, ids: list[list[int]], autojump_clock: MockClock
) -> None:
    assert vectors(await embed(input=given)) == [vector_of(each) for each in ids]


async def test_more_inputs_than_a_batch_holds(autojump_clock: MockClock) -> None:
    runner = LengthEmbedder()
    call = await embed(runner, input=[[number] for number in range(100)])
    assert vectors(call) == [vector_of([number]) for number in range(100)]
    assert max(runner.batches) == 8
    assert sum(runner.batches) == 100


async def test_base64_is_the_float32_themselves(autojump_clock: MockClock) -> None:
    call = await embed(input=[5, 6], encoding_format="base64")
    data = base64.b64decode(vectors(call)[0])
    assert array.array("f", data).tolist() == vector_of([5, 6])


async def test_a_shorter_vector_where_the_model_allows(autojump_clock: MockClock) -> None:
    for runner in (LengthEmbedder(any_dimensions=True), LengthEmbedder(dimensions=(2,))):
        vector = vectors(await embed(runner, input=[3, 1], dimensions=2))[0]
        whole = vector_of([3, 1])
        length = math.hypot(*whole[:2])
        assert vector == pytest.approx([whole[0] / length, whole[1] / length], rel=1e-6)
        assert vectors(await embed(runner, input=[3, 1], dimensions=4))[0] == whole


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ""}, "input"),
        ({"input": [2**31]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"input": "a", "priority": 2**40}, "priority"),
        ({"input": "a", "timeout": 0}, "timeout"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": ["a"] * 3000}, "input"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    body: dict[str, Any], param: str, autojump_clock: MockClock
) -> None:
    call = await embed(**body)
    assert (call.status, call.error["param"]) == (400, param)


async def test_what_changes_nothing_is_let_pass(autojump_clock: MockClock) -> None:
    said: dict[str, Any] = {"truncation_side": "right", "normalize": True, "messages": None}
    assert vectors(await embed(input=[5, 6], **said)) == [vector_of([5, 6])]


async def test_what_is_too_long_is_refused_with_the_numbers_or_cut(
    autojump_clock: MockClock,
) -> None:
    ids = list(range(1, MAX_LEN + 4))
    refused = await embed(input=[[1], ids])
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "32" in refused.error["message"]
    assert "input 1 has 35" in refused.error["message"]
    whole = await embed(input=ids, truncate_prompt_tokens=-1)
    assert vectors(whole) == [vector_of(ids[:MAX_LEN])]
    few = await embed(input=ids, truncate_prompt_tokens=2)
    assert vectors(few) == [vector_of([1, 2])]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_model_for_embeddings_writes_no_text(path: str, autojump_clock: MockClock) -> None:
    async with open_embedding_world() as world:
        call = await world.api.post(path, body_for(path))
        assert (call.status, call.error["param"]) == (400, "model")
        assert PATH in call.error["message"]


async def test_a_model_for_text_makes_no_embeddings(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        call = await world.api.post(PATH, {"input": "a"})
        assert (call.status, call.error["param"]) == (400, "model")


async def test_a_deadline_ends_it_everywhere(autojump_clock: MockClock) -> None:
    async with open_embedding_world() as world:  # an engine that takes no turn
        call = await world.api.post(PATH, {"input": "a", "timeout": 2})
        assert (call.status, call.error["code"]) == (504, "deadline_exceeded")


async def test_an_engine_that_dies_is_a_503(autojump_clock: MockClock) -> None:
    async with open_embedding_world() as world:
        call = world.start("POST", PATH, {"input": "a"})
        await world.settle()
        world.engine.crash()
        world.client.status.report_exit("killed by SIGKILL")
        await call.finished.wait()
        assert (call.status, call.error["code"]) == (503, "engine_dead")
