"""The official client against the real default model: each of its ways, each of its errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from helpers.foreign_service import MAX_QUEUE
from helpers.openai_shapes import strictly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.foreign_service import Service

pytestmark = [pytest.mark.ecosystem, pytest.mark.process, pytest.mark.slow]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Verdict(BaseModel):
    """What a model is to answer with."""

    city: Literal["Paris", "Rome"]
    reason: str = Field(max_length=60)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=service.url, api_key=service.key, max_retries=0, timeout=60
    ) as client:
        yield client


def chat(service: Service, **fields: Any) -> dict[str, Any]:
    return {
        "model": service.model, "messages": QUESTION, "temperature": 0,
        "max_completion_tokens": 40,
    } | fields  # fmt: skip


def test_a_chat_whole_streamed_and_raw(service: Service, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**chat(service))
    whole = strictly(ChatCompletion, json.loads(raw.text))
    assert raw.headers["x-request-id"]
    assert raw.parse() == whole
    chunks = list(client.chat.completions.create(**chat(service), stream=True))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk.model_dump())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert "Paris" in text


def test_a_streaming_response_is_read_by_lines(service: Service, client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        **chat(service), stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])


def test_stream_helper_with_events(service: Service, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**chat(service)) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in str(final.choices[0].message.content)


def test_parse_gives_the_pydantic_model(service: Service, client: openai.OpenAI) -> None:
    fields = chat(service, max_completion_tokens=200, response_format=Verdict)
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed


def test_tools_whole_and_streamed(service: Service, client: openai.OpenAI) -> None:
    fields = chat(service, tools=[WEATHER], tool_choice="required", max_completion_tokens=100)
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call, *_) = whole.message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    arguments = ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index == 0 and delta.function is not None:
                arguments += delta.function.arguments or ""
    assert arguments == call.function.arguments
    # And the conversation goes on from the result.
    turns = [*QUESTION, whole.message.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # fmt: skip
    answer = client.chat.completions.create(
        **chat(service, messages=turns, tools=[WEATHER], tool_choice="none")
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_completions_whole_and_streamed(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": service.model, "prompt": ["The capital of France is", "The capital of Italy is"],
        "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True,
    }  # fmt: skip
    raw = client.completions.with_raw_response.create(**fields)
    whole = strictly(Completion, json.loads(raw.text))
    assert "Paris" in whole.choices[0].text
    assert "Rome" in whole.choices[1].text
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_responses_whole_and_streamed(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": service.model, "input": "What is the capital of France?", "temperature": 0,
        "max_output_tokens": 40,
    }  # fmt: skip
    whole = client.responses.create(**fields)
    assert "Paris" in whole.output_text
    deltas, last = "", None
    for event in client.responses.create(**fields, stream=True):
        last = event
        if event.type == "response.output_text.delta":
            deltas += event.delta
    assert deltas == whole.output_text
    assert last is not None
    assert last.type == "response.completed"
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == deltas


def test_embeddings_of_both_encodings(embedder: Service) -> None:
    with openai.OpenAI(base_url=embedder.url, api_key=embedder.key) as client:
        texts = ["a cat", "a kitten"]
        as_base64 = client.embeddings.create(model=embedder.model, input=texts)  # its default
        raw = client.embeddings.with_raw_response.create(
            model=embedder.model, input=texts, encoding_format="float"
        )
    as_floats = strictly(CreateEmbeddingResponse, json.loads(raw.text))
    for one, other in zip(as_base64.data, as_floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_the_asynchronous_client(service: Service) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=service.url, api_key=service.key, max_retries=0
        ) as client:
            whole = await client.chat.completions.create(**chat(service))
            stream = await client.chat.completions.create(**chat(service), stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content
            many = await asyncio.gather(
                *(client.chat.completions.create(**chat(service)) for _ in range(8))
            )
            assert {answer.choices[0].message.content for answer in many} == {text}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**chat(service, top_logprobs=21))
            assert refused.value.param == "top_logprobs"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("kind", "code", "param", "fields"),
    [
        (openai.BadRequestError, "invalid_value", "temperature", {"temperature": 9}),
        (openai.BadRequestError, "context_length_exceeded", "messages",
         {"messages": [{"role": "user", "content": "a " * 9000}]}),
        (openai.NotFoundError, "model_not_found", "model", {"model": "nope"}),
        (openai.APIStatusError, "deadline_exceeded", None,
         {"extra_body": {"timeout": 0.3, "ignore_eos": True}, "max_completion_tokens": 4000}),
        (openai.InternalServerError, "deadline_exceeded", None,
         {"extra_headers": {"X-Request-Timeout": "0.3"}, "max_completion_tokens": 4000,
          "extra_body": {"ignore_eos": True}}),
    ],
)  # fmt: skip
def test_each_refusal_has_its_class(
    service: Service,
    client: openai.OpenAI,
    kind: type[openai.APIStatusError],
    code: str,
    param: str | None,
    fields: dict[str, Any],
) -> None:
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**chat(service, **fields))
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.request_id


def test_a_wrong_key(service: Service) -> None:
    with (
        openai.OpenAI(base_url=service.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"


def test_a_full_queue(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": MAX_QUEUE, "max_completion_tokens": 4000, "stream": True}
    fields["extra_body"] = {"ignore_eos": True}
    with client.chat.completions.create(**chat(service, **fields)) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**chat(service))
    assert refused.value.code == "overloaded"
    assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_cancelled_by_its_id_is_a_conflict(service: Service, client: openai.OpenAI) -> None:
    fields = chat(service, max_completion_tokens=4000, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(**fields, stream=True)
    first = next(stream)
    client.post(f"/requests/{first.id}/cancel", cast_to=object)
    with pytest.raises(openai.APIError, match="cancel"):
        list(stream)


def test_a_client_out_of_patience(service: Service, client: openai.OpenAI) -> None:
    impatient = client.with_options(timeout=0.3)
    fields = chat(service, max_completion_tokens=4000, extra_body={"ignore_eos": True})
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(**fields)


def test_nobody_is_there() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()
