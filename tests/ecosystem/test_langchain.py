"""LangChain's ``ChatOpenAI`` and ``OpenAIEmbeddings``: only ``base_url`` is ours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from helpers.foreign_service import Service

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")

pytestmark = [pytest.mark.ecosystem, pytest.mark.process, pytest.mark.slow]

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=40)
    population: int = Field(ge=0, le=50_000_000)


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"It is sunny in {city}."


def chat_model(service: Service, **fields: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        **{
            "base_url": service.url, "api_key": service.key, "model": service.model,
            "temperature": 0, "max_completion_tokens": 40, "max_retries": 0,
        } | fields
    )  # fmt: skip


def test_invoke(service: Service) -> None:
    answer = chat_model(service).invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == service.model
    assert answer.usage_metadata["output_tokens"] > 0


def test_a_conversation(service: Service) -> None:
    turns = [
        messages.SystemMessage("Answer with one word."),
        messages.HumanMessage("What is the capital of Italy?"),
        messages.AIMessage("Rome"),
        messages.HumanMessage(QUESTION),
    ]
    assert "Paris" in chat_model(service).invoke(turns).content


def test_stream_joins_to_what_invoke_gives(service: Service) -> None:
    model = chat_model(service, stream_usage=True)
    chunks = list(model.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3
    plain = model.invoke(QUESTION)
    assert whole.content == plain.content
    assert whole.usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]
    assert whole.response_metadata["finish_reason"] == "stop"


def test_asynchronous_and_in_batches(service: Service) -> None:
    async def ask() -> tuple[str, list[Any]]:
        model = chat_model(service)
        pieces = [chunk.content async for chunk in model.astream(QUESTION)]
        return "".join(pieces), await model.abatch([QUESTION] * 4)

    text, answers = asyncio.run(ask())
    assert [answer.content for answer in answers] == [text] * 4


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_bind_tools(service: Service, choice: str) -> None:
    tool = tools.tool(get_weather)
    model = chat_model(service, max_completion_tokens=100).bind_tools([tool], tool_choice=choice)
    question = messages.HumanMessage("How is the weather in Paris?")
    answer = model.invoke([question])
    assert not answer.invalid_tool_calls
    (call, *_) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    # The call's result goes back, and the conversation goes on from there.
    result = tool.invoke(call)
    assert isinstance(result, messages.ToolMessage)
    follow_up = chat_model(service).bind_tools([tool], tool_choice="none")
    assert follow_up.invoke([question, answer, result]).content


def test_streamed_calls_join_to_whole_ones(service: Service) -> None:
    tool = tools.tool(get_weather)
    model = chat_model(service, max_completion_tokens=100).bind_tools([tool], tool_choice="any")
    whole = None
    for chunk in model.stream("How is the weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    plain = model.invoke("How is the weather in Paris?")
    assert whole is not None
    told = [[(call["name"], call["args"]) for call in message.tool_calls] for message in
            (whole, plain)]  # fmt: skip
    assert told[0] == told[1]
    assert told[0]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_with_structured_output(service: Service, method: str) -> None:
    model = chat_model(service, max_completion_tokens=200).with_structured_output(
        City, method=method, include_raw=True
    )
    question = "Describe Paris as JSON with its 'name' and 'population'."
    answer = model.invoke(question)
    if method == "json_mode":  # any object: a small model need not hit the names
        assert answer["raw"].content.lstrip().startswith("{")
    else:
        assert answer["parsing_error"] is None
        assert isinstance(answer["parsed"], City)


def test_a_refusal_is_openais_own_error(service: Service) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat_model(service, temperature=3).invoke(QUESTION)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat_model(service, model="nope").invoke(QUESTION)
    with pytest.raises(openai.AuthenticationError):
        chat_model(service, api_key="wrong").invoke(QUESTION)


def test_through_the_responses_endpoint(service: Service) -> None:
    model = chat_model(service, use_responses_api=True)
    assert "Paris" in model.invoke(QUESTION).text
    pieces = [chunk.text for chunk in model.stream(QUESTION)]
    assert "Paris" in "".join(pieces)


def test_the_older_completions(service: Service) -> None:
    model = langchain_openai.OpenAI(
        base_url=service.url, api_key=service.key, model=service.model, temperature=0,
        max_tokens=6, max_retries=0,
    )  # fmt: skip
    text = model.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(model.stream("The capital of France is")) == text


def test_embeddings(embedder: Service) -> None:
    # Unless told otherwise it cuts text by the tokens of OpenAI's own models.
    model = langchain_openai.OpenAIEmbeddings(
        base_url=embedder.url, api_key=embedder.key, model=embedder.model, max_retries=0,
        check_embedding_ctx_length=False,
    )  # fmt: skip
    cat, kitten, rocket = model.embed_documents(["a cat", "a kitten", "a rocket engine"])
    assert len(cat) == 384

    def likeness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert likeness(cat, kitten) > likeness(cat, rocket)
    assert likeness(cat, model.embed_query("a cat")) > 0.999
