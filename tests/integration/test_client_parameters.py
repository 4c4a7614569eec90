"""The official client, in each of its ways, asks a running server for everything beside text."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.openai_shapes import strictly
from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

CHAT: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "max_completion_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "seed": 5,
    "logit_bias": {"300": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
COMPLETION: dict[str, Any] = {
    "model": "sim",
    "prompt": ["a b", "c"],
    "max_tokens": 5,
    "logprobs": 2,
    "echo": True,
    "n": 2,
    "seed": 5,
    "extra_body": {"return_token_ids": True, "repetition_penalty": 1.1, "min_tokens": 2},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    args = json.dumps({"tokens_from": "seed"})
    with ServerProcess("--engine-args", args) as server:
        server.wait_ready()
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0, timeout=30) as client:
        yield client


def raw_json(response: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(response.text)
    return answer


def test_a_chat_raw_streamed_and_parsed(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-request-id"]
    whole = strictly(ChatCompletion, raw_json(raw))
    assert raw.parse().choices == whole.choices
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk.model_dump())
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert choice.logprobs is not None
        told = [item for c in mine if c.logprobs for item in c.logprobs.content or ()]
        assert told == choice.logprobs.content
        assert len(told) == 5
        assert all(len(item.top_logprobs) == 2 for item in told)


def test_completions_raw_streamed_and_parsed(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**COMPLETION)
    whole = strictly(Completion, raw_json(raw))
    assert [choice.text[:1] for choice in raw.parse().choices] == ["a", "a", "c", "c"]
    texts = [""] * 4
    for chunk in client.completions.create(**COMPLETION, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_the_asynchronous_client(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            whole = await client.chat.completions.create(**CHAT)
            texts = ["", ""]
            async for chunk in await client.chat.completions.create(**CHAT, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert texts == [choice.message.content for choice in whole.choices]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**CHAT | {"top_logprobs": 21})
            assert refused.value.param == "top_logprobs"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 129}, "n"),
    ],
)
def test_a_value_out_of_range_is_a_bad_request(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "sim", "prompt": "a"} | fields)
    assert (refused.value.param, refused.value.code) == (param, "invalid_value")
    assert refused.value.type == "invalid_request_error"
