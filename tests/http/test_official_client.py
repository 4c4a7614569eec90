"""The official ``openai`` package against the real app on a real socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import openai
import pytest
import trio

from helpers.api_world import World, open_world
from helpers.raw_http import running
from trioengine.engine_proc.sim_runner import SimScript

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from openai.types.chat import ChatCompletionMessageParam

Result = TypeVar("Result")

SEEDED = SimScript(num_blocks=256, max_model_len=1024, tokens_from="seed")
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


class Bench:
    """A world behind a socket, and the official client in a thread."""

    def __init__(self, world: World, url: str) -> None:
        self.world = world
        self._url = url

    async def ask(self, question: Callable[[openai.OpenAI], Result], key: str = "k") -> Result:
        """Return what ``question`` gets from the client."""

        def work() -> Result:
            with openai.OpenAI(base_url=f"{self._url}/v1", api_key=key, max_retries=0) as client:
                return question(client)

        return await trio.to_thread.run_sync(work)


@asynccontextmanager
async def open_bench(*, step_time_s: float = 0.0, **config: Any) -> AsyncIterator[Bench]:
    async with (
        open_world(script=SEEDED, api_keys=("k",), **config) as world,
        running(world.app) as server,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(world.engine.run_freely, step_time_s)
        yield Bench(world, server.server.binds[0])
        nursery.cancel_scope.cancel()


async def test_chat_whole_and_streamed() -> None:
    async with open_bench() as bench:
        whole = await bench.ask(
            lambda client: client.chat.completions.create(
                model="sim", messages=HELLO, max_completion_tokens=8, seed=3, n=2
            )
        )

        def stream(client: openai.OpenAI) -> list[str]:
            texts = ["", ""]
            with client.chat.completions.create(
                model="sim", messages=HELLO, max_tokens=8, seed=3, n=2, stream=True,
                stream_options={"include_usage": True},
            ) as chunks:  # fmt: skip
                for chunk in chunks:
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == 16
            return texts

        assert await bench.ask(stream) == [choice.message.content for choice in whole.choices]
        assert whole.choices[0].message.content != whole.choices[1].message.content


async def test_completions_whole_and_streamed() -> None:
    async with open_bench() as bench:
        whole = await bench.ask(
            lambda client: client.completions.create(
                model="sim", prompt=["a", "b"], max_tokens=8, seed=3
            )
        )

        def stream(client: openai.OpenAI) -> list[str]:
            texts = ["", ""]
            for chunk in client.completions.create(
                model="sim", prompt=["a", "b"], max_tokens=8, seed=3, stream=True
            ):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return texts

        assert await bench.ask(stream) == [choice.text for choice in whole.choices]


async def test_models() -> None:
    async with open_bench() as bench:
        listed = await bench.ask(lambda client: list(client.models.list()))
        assert [model.id for model in listed] == ["sim"]
        assert (await bench.ask(lambda client: client.models.retrieve("sim"))).id == "sim"


def chat(client: openai.OpenAI, **fields: Any) -> object:
    return client.chat.completions.create(**{"model": "sim", "messages": HELLO} | fields)


async def test_each_refusal_is_the_exception_that_users_catch() -> None:
    async with open_bench(max_queue_sequences=1) as bench:
        with pytest.raises(openai.NotFoundError) as missing:
            await bench.ask(lambda client: chat(client, model="nope"))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await bench.ask(lambda client: chat(client, temperature=9))
        assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
        assert bad.value.type == "invalid_request_error"
        with pytest.raises(openai.AuthenticationError) as wrong:
            await bench.ask(chat, key="wrong")
        assert wrong.value.code == "invalid_api_key"
        with bench.world.client.admission.reserve(), pytest.raises(openai.RateLimitError) as full:
            await bench.ask(chat)
        assert full.value.code == "overloaded"
        bench.world.client.status.mark_draining()
        with pytest.raises(openai.InternalServerError) as draining:
            await bench.ask(chat)
        assert (draining.value.status_code, draining.value.code) == (503, "draining")


async def test_an_engine_that_dies_in_a_stream_raises_in_the_client() -> None:
    async with open_bench(step_time_s=3600) as bench:  # one step, then nothing
        token = trio.lowlevel.current_trio_token()
        texts: list[str] = []

        def kill() -> None:
            bench.world.engine.crash()
            bench.world.client.status.report_exit("killed by SIGKILL")

        def read(client: openai.OpenAI) -> None:
            for chunk in client.chat.completions.create(model="sim", messages=HELLO, stream=True):
                if text := chunk.choices[0].delta.content:
                    texts.append(text)
                    trio.from_thread.run_sync(kill, trio_token=token)

        with pytest.raises(openai.APIError, match="SIGKILL"):
            await bench.ask(read)
        assert len(texts) == 1
