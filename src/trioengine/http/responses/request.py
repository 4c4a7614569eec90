"""The body of a response request → the chat that it means. Pure.

Nothing is stored here: what refers to an earlier response, or to an item by its id, is refused.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from trioengine.errors import InvalidRequestError
from trioengine.http.schemas import (
    NOT_SAID,
    UNSUPPORTED,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    StreamOptions,
    ToolCall,
)
from trioengine.http.structured import schema_shape
from trioengine.http.tools.request import (
    FunctionTool,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolChoice,
)
from trioengine.structured import StructuredOutput

__all__ = ["REFUSED", "ResponseRequest", "as_chat", "text_shape"]

MAX_ITEMS: Final = 16_384

# As ``UNSUPPORTED``: what this endpoint cannot do, and what it calls by another name than chats do.
REFUSED: Final[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {
    "prompt": (),
    "top_logprobs": (0,),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
}

# Fields that mean here what they mean in a chat.
_SHARED: Final = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "structured_outputs", "chat_template_kwargs", "cache_salt", "priority",
    "timeout", "parallel_tool_calls",
)  # fmt: skip
# What `include` may ask for. The items that all but the last tell more of do not occur here.
_Included = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})


class InputPart(msgspec.Struct, kw_only=True):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call, or the result of one, told apart by ``type``."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    def __post_init__(self) -> None:
        if self.type is None and self.role is None:  # the first of a million ends the decoding
            raise ValueError("an item has a 'type' or a 'role'")


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function, flat as this endpoint has them."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    """``tool_choice`` that names a function."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``text.format``; a JSON schema stands in it flat, as everything here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """``reasoning``. Thoughts are told as they are, summary or not."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``; ``top_k`` and what follows it are vLLM's and ours."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[_Included] | None = None
    stream_options: StreamOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Raw = NOT_SAID
    chat_template_kwargs: Raw = NOT_SAID
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None

    prompt: Raw = NOT_SAID
    top_logprobs: Raw = NOT_SAID
    messages: Raw = NOT_SAID
    max_tokens: Raw = NOT_SAID
    max_completion_tokens: Raw = NOT_SAID
    n: Raw = NOT_SAID
    logprobs: Raw = NOT_SAID
    response_format: Raw = NOT_SAID
    reasoning_effort: Raw = NOT_SAID


def as_chat(body: ResponseRequest) -> ChatCompletionRequest:
    """Return the chat that ``body`` means.

    Raises:
        InvalidRequestError: It refers to what is not kept here, or asks for what is not done.
    """
    _refuse(body)
    instructions = [ChatMessage(role="system", content=body.instructions)]
    shared: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    return ChatCompletionRequest(
        **shared,
        messages=[*(instructions if body.instructions is not None else ()), *_messages(body)],
        max_completion_tokens=body.max_output_tokens,
        # The last event carries the usage, asked for or not.
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        tools=[_tool(tool, number) for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )


def text_shape(body: ResponseRequest) -> StructuredOutput | None:
    """Return what shape ``text.format`` asks for; ``None`` for any.

    Raises:
        InvalidRequestError: There is no schema or no name where there has to be.
    """
    name = "text.format"
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutput("json_object", param=name)
    if asked.name is None:
        raise InvalidRequestError(f"'{name}.name' is required.", param=f"{name}.name")
    return schema_shape(asked.schema, asked.strict, name, name)


def _refuse(body: ResponseRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(
                f"'{name}' is not supported: this server keeps no responses. Send the whole "
                "conversation as 'input'.",
                param=name,
            )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "'stream_options' is only allowed with 'stream': true.", param="stream_options"
        )
    refused = {
        "background": body.background,
        "truncation": body.truncation == "auto",
        "include": "message.output_text.logprobs" in (body.include or ()),
    }
    for name, asked in refused.items():
        if asked:
            raise InvalidRequestError(
                f"'{name}' with this value is not supported by this server.", param=name
            )


def _messages(body: ResponseRequest) -> list[ChatMessage]:
    if isinstance(body.input, str):
        return [ChatMessage(role="user", content=body.input)]
    if not 1 <= len(body.input) <= MAX_ITEMS:
        raise InvalidRequestError(
            f"'input' takes 1 to {MAX_ITEMS} items, got {len(body.input)}.", param="input"
        )
    messages: list[ChatMessage] = []
    for number, item in enumerate(body.input):
        message = _message(item, f"input[{number}]")
        if message is None:
            continue
        before = messages[-1] if messages else None
        if message.tool_calls and before is not None and before.role == "assistant":
            # Text and calls of one turn are items of their own here, and one message in a chat.
            before.tool_calls = [*(before.tool_calls or ()), *message.tool_calls]
        else:
            messages.append(message)
    if not messages:
        raise InvalidRequestError("'input' has no message.", param="input")
    return messages


def _message(item: InputItem, param: str) -> ChatMessage | None:
    kind = item.type or "message"
    if kind.startswith("function_call") and item.call_id is None:
        raise InvalidRequestError(f"'{param}.call_id' is required.", param=f"{param}.call_id")
    if kind == "message" and item.role is not None and item.content is not None:
        return ChatMessage(role=item.role, content=_content(item.content, param))
    if kind == "function_call" and item.name is not None:
        function = FunctionCall(name=item.name, arguments=item.arguments)
        return ChatMessage(
            role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)]
        )
    if kind == "function_call_output" and item.output is not None:
        content = _content(item.output, param)
        return ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
    if kind == "reasoning":
        return None  # what a model thought is not shown to it again
    wrong = "is not complete" if kind in _KINDS else "is not supported"
    raise InvalidRequestError(f"An item of type '{kind[:50]}' {wrong}.", param=param)


_KINDS: Final = frozenset({"message", "function_call", "function_call_output"})


def _content(content: str | list[InputPart], param: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS or text is None:
            raise InvalidRequestError(
                f"A content part of type '{part.type[:50]}' is not supported: this model reads "
                "text only.",
                param=f"{param}.content[{number}]",
            )
        parts.append(ContentPart(type="text", text=text))
    return parts


def _tool(tool: ResponseTool, number: int) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise InvalidRequestError(
            f"A tool of type '{tool.type[:50]}' is not supported: this server has functions with "
            "a 'name' only.",
            param=f"tools[{number}].type",
        )
    function = FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(body: ResponseRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return NamedChoice(function=NamedFunction(name=choice.name))
    if choice == "auto" and not body.tools:  # the default, which clients repeat
        return None
    return choice
