"""The official ``openai`` client against a running server, simulated and real."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import openai
import pytest

from helpers.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEY = "a-key"
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    args = json.dumps({"tokens_from": "seed"})
    environ = {"TRIOENGINE_API_KEY": KEY}
    with ServerProcess("--engine-args", args, "--max-queue", "64", env=environ) as server:
        yield server.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def connect(server: ServerProcess, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=30
    )


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id


def test_a_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="sim", messages=QUESTION, max_completion_tokens=12, seed=5
    )
    chunks = list(
        client.chat.completions.create(
            model="sim",
            messages=QUESTION,
            max_completion_tokens=12,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens == 12


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "code", "model", "key"),
    [
        (openai.NotFoundError, "model_not_found", "nope", KEY),
        (openai.AuthenticationError, "invalid_api_key", "sim", "wrong"),
    ],
)
def test_refusals_have_the_clients_own_types(
    server: ServerProcess, kind: type[openai.APIStatusError], code: str, model: str, key: str
) -> None:
    with connect(server, key) as client, pytest.raises(kind) as caught:
        client.completions.create(model=model, prompt="x")
    assert caught.value.code == code


def test_a_full_queue_is_a_rate_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="sim", prompt=["x"] * 65, max_tokens=1)
    with client.completions.create(
        model="sim", prompt=["x"] * 64, max_tokens=8000, stream=True
    ) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="sim", prompt="x", max_tokens=1)
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 60


def test_a_death_in_the_middle_of_a_stream_is_an_error_of_the_client() -> None:
    args = json.dumps({"step_time_ms": 5})
    with ServerProcess("--engine-args", args, "--death-grace", "0.2") as server:
        server.wait_ready()
        with connect(server) as client:
            stream = client.completions.create(
                model="sim", prompt="x", max_tokens=8000, stream=True
            )
            next(stream)
            os.kill(server.engine_pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="SIGKILL"):
                list(stream)
        assert server.wait() == 3
