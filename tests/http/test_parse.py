"""``.parse()`` of the official client: answers become the models that were asked for."""

from __future__ import annotations

import datetime  # noqa: TC003 - pydantic looks at annotations
import enum
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import openai
import pytest
import trio
from pydantic import BaseModel, Field

from helpers.api_world import open_world
from helpers.raw_http import running
from trioengine.engine_proc.sim_runner import SimScript

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai.types.chat import ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
SCRIPT = SimScript(num_blocks=256, max_model_len=4096, tokens_from="seed")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(BaseModel):
    kind: Literal["wheel"]
    size: Annotated[int, Field(ge=10, le=29)]


class Rail(BaseModel):
    kind: Literal["rail"]
    length: Annotated[float, Field(gt=0, lt=9.5, multiple_of=0.5)]


class Car(BaseModel):
    """Of everything that a grammar has something to do with."""

    colour: Colour
    built: datetime.date
    seen_at: datetime.datetime
    plate: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]
    on: Wheel | Rail
    seats: Annotated[list[Literal[1, 2, 3]], Field(min_length=1, max_length=3)]
    weight: Annotated[int, Field(ge=0, le=5000)] | None
    electric: bool
    spare: Wheel | None = None


@asynccontextmanager
async def open_url() -> AsyncIterator[str]:
    async with (
        open_world(script=SCRIPT) as world,
        running(world.app) as server,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(world.engine.run_freely, 0.0)
        yield f"{server.server.binds[0]}/v1"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_in_a_thread() -> None:
    async with open_url() as url:

        def work() -> tuple[list[Car | None], Car | None, list[str]]:
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                chat = client.chat.completions.parse(
                    model="sim", messages=HELLO, response_format=Car, n=3, seed=1
                )
                response = client.responses.parse(model="sim", input="hello", text_format=Car)
                with client.chat.completions.stream(
                    model="sim", messages=HELLO, response_format=Car, seed=1
                ) as stream:
                    kinds: list[str] = [event.type for event in stream]
                    streamed = stream.get_final_completion().choices[0].message.parsed
                assert streamed == chat.choices[0].message.parsed
                parsed = [choice.message.parsed for choice in chat.choices]
                return parsed, response.output_parsed, kinds

        cars, car, kinds = await trio.to_thread.run_sync(work)
        assert all(isinstance(one, Car) for one in (*cars, car))
        assert "content.done" in kinds


@pytest.mark.slow
async def test_in_a_task() -> None:
    async with (
        open_url() as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        chat = await client.chat.completions.parse(
            model="sim", messages=HELLO, response_format=Car, seed=2
        )
        assert isinstance(chat.choices[0].message.parsed, Car)
        response = await client.responses.parse(model="sim", input="hello", text_format=Car)
        assert isinstance(response.output_parsed, Car)
        async with client.responses.stream(
            model="sim", input="hello", text_format=Car, extra_body={"seed": 3}
        ) as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert isinstance(final.output_parsed, Car)
        assert "".join(deltas) == final.output_text


@pytest.mark.slow
async def test_arguments_of_a_function() -> None:
    async with (
        open_url() as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        chat = await client.chat.completions.parse(
            model="sim", messages=HELLO, tool_choice="required", parallel_tool_calls=False,
            tools=[openai.pydantic_function_tool(Car)],
        )  # fmt: skip
        calls = chat.choices[0].message.tool_calls
        assert calls is not None
        assert [type(call.function.parsed_arguments) for call in calls] == [Car]


async def test_an_answer_that_was_cut_is_said_to_be() -> None:
    async with (
        open_url() as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="sim", messages=HELLO, response_format=Car, max_tokens=3
            )


async def test_a_model_that_cannot_be_followed_is_a_bad_request() -> None:
    class Unique(BaseModel):
        names: set[str]

    async with (
        open_url() as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as chat:
            await client.chat.completions.parse(model="sim", messages=HELLO, response_format=Unique)
        assert chat.value.param == "response_format"
        with pytest.raises(openai.BadRequestError) as response:
            await client.responses.parse(model="sim", input="hello", text_format=Unique)
        assert response.value.param == "text.format"
