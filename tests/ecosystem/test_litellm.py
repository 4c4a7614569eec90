"""LiteLLM, to which this is "some server that speaks OpenAI"."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers.foreign_service import MAX_QUEUE

if TYPE_CHECKING:
    from helpers.foreign_service import Service

litellm = pytest.importorskip("litellm")

pytestmark = [pytest.mark.ecosystem, pytest.mark.process, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}


def arguments(service: Service, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{service.model}", "api_base": service.url, "api_key": service.key,
        "messages": QUESTION, "temperature": 0, "max_tokens": 40, "num_retries": 0,
    } | fields  # fmt: skip


def test_completion(service: Service) -> None:
    answer = litellm.completion(**arguments(service))
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streaming(service: Service) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**arguments(service, **options)))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    whole = litellm.completion(**arguments(service))
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == "stop"
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_asynchronously(service: Service) -> None:
    async def ask() -> list[str]:
        whole = await litellm.acompletion(**arguments(service))
        streamed = await litellm.acompletion(**arguments(service, stream=True))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in streamed]
        return [whole.choices[0].message.content, "".join(pieces)]

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


def test_text_completion(service: Service) -> None:
    fields = arguments(service, prompt="The capital of France is", max_tokens=6)
    fields["model"] = f"text-completion-openai/{service.model}"
    del fields["messages"]
    assert "Paris" in litellm.text_completion(**fields).choices[0].text


def test_tools(service: Service) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    answer = litellm.completion(**arguments(service, **fields))
    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_structured_output(service: Service) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    format_ = {
        "type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}
    }  # fmt: skip
    answer = litellm.completion(**arguments(service, response_format=format_))
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}


def test_logprobs_and_several_choices(service: Service) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0, "seed": 3}
    answer = litellm.completion(**arguments(service, **fields))
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        told = choice.logprobs.content
        # The token that ends a turn is one of them.
        assert "".join(item.token for item in told).startswith(choice.message.content)
        assert all(len(item.top_logprobs) == 2 for item in told)


def test_embeddings(embedder: Service) -> None:
    answer = litellm.embedding(
        model=f"openai/{embedder.model}", api_base=embedder.url, api_key=embedder.key,
        input=["a cat", "a rocket"], encoding_format="float",
    )  # fmt: skip
    assert [len(entry["embedding"]) for entry in answer.data] == [384, 384]
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("kind", "status", "fields"),
    [
        ("BadRequestError", 400, {"presence_penalty": 9}),
        ("ContextWindowExceededError", 400,
         {"messages": [{"role": "user", "content": "a " * 9000}]}),
        ("AuthenticationError", 401, {"api_key": "wrong"}),
        ("NotFoundError", 404, {"model": "openai/nope"}),
        ("Timeout", 408, {"max_tokens": 4000, "timeout": 0.2,
                          "extra_body": {"ignore_eos": True}}),
    ],
)  # fmt: skip
def test_each_refusal_is_the_exception_of_that_name(
    service: Service, kind: str, status: int, fields: dict[str, Any]
) -> None:
    with pytest.raises(getattr(litellm, kind)) as refused:
        litellm.completion(**arguments(service, **fields))
    assert refused.value.status_code == status


def test_a_full_queue_is_a_rate_limit(service: Service) -> None:
    fields = {"n": MAX_QUEUE, "max_tokens": 4000, "stream": True}
    with_everything = arguments(service, **fields, extra_body={"ignore_eos": True})
    stream = litellm.completion(**with_everything)
    try:
        next(iter(stream))
        with pytest.raises(litellm.RateLimitError) as refused:
            litellm.completion(**arguments(service))
        assert refused.value.status_code == 429
    finally:
        stream.completion_stream.close()
