"""A conversation → the tokens that the model reads, and where they leave it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import InvalidRequestError
from trioengine.http import reasoning
from trioengine.http.convert import bad_word_ids
from trioengine.http.details import Thinking
from trioengine.http.messages import normalise, template_arguments
from trioengine.http.prompts import check_text_length
from trioengine.http.tools import fallback
from trioengine.http.tools.fallback import with_tools
from trioengine.http.tools.formats import detect_format
from trioengine.http.tools.reader import ToolReading
from trioengine.http.tools.request import calls_schema, read_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioengine.http.front import Front
    from trioengine.http.schemas import ChatCompletionRequest, ChatMessage
    from trioengine.http.tools.request import ToolUse
    from trioengine.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "read_chat"]

# A message costs the template some work beyond its content's length.
_CHARS_PER_MESSAGE: Final = 64
_MAX_TEMPLATE_CHARS: Final = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it.

    Attributes:
        token_ids: Not empty.
        bad_words: Token ids of the body's ``bad_words``.
        echo: What the answer is to begin with, where it is to repeat the last message.
        thinking: Where the prompt leaves a model that thinks aloud; ``None`` for any other.
        tools: How calls are read out of the reply; ``None`` where there are no tools.
    """

    token_ids: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    echo: str | None
    thinking: Thinking | None
    tools: ToolReading | None


async def read_chat(
    front: Front, body: ChatCompletionRequest, cut: Callable[[list[int]], list[int]]
) -> ChatPrompt:
    """Return the prompt of ``body``, worked out where nobody waits for it.

    Args:
        front: What the routes share.
        body: Checked.
        cut: Truncates the prompt.

    Raises:
        InvalidRequestError: The template cannot be used, or refuses the messages.
    """
    template = _template(front, body)
    messages = await front.offload(
        lambda: normalise(body.messages), num_chars=_CHARS_PER_MESSAGE * _count(body.messages)
    )
    tokenizer = front.tokenizer()
    arguments = template_arguments(body.chat_template_kwargs) | _effort(body, tokenizer, template)
    arguments |= _documents(body, tokenizer, template)
    num_chars = sum(len(turn["content"]) + _CHARS_PER_MESSAGE for turn in messages)
    num_chars += len(template or "") + sum(map(len, body.bad_words or ()))
    num_chars += sum(len(str(document)) for document in body.documents or ())
    continues = bool(body.continue_final_message)
    use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    reading = None
    if use is not None:
        taught = detect_format(lambda word: _mentions(tokenizer, template, word))
        reading = _reading(use, front.config.tool_call_parser or taught)
        told = use.for_template()
        num_chars += sum(len(str(tool)) for tool in told)
        if taught is None:
            messages = with_tools(messages, told)
        else:
            arguments["tools"] = told

    def work() -> ChatPrompt:
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            chat_template=template,
            **arguments,
        )
        if body.truncate_prompt_tokens is None:
            check_text_length(len(text), front.model.max_model_len, param="messages")
        return ChatPrompt(
            cut(tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))),
            bad_word_ids(body.bad_words or (), partial(tokenizer.encode, add_special_tokens=False)),
            _echo(body, messages),
            _thinking(body, tokenizer, template, messages[-1]["content"] if continues else text),
            reading,
        )

    prompt = await front.offload(work, num_chars=num_chars)
    if not prompt.token_ids:
        raise InvalidRequestError("These messages make an empty prompt.", param="messages")
    return prompt


def _count(messages: Sequence[ChatMessage]) -> int:
    """Return how many messages and parts there are."""
    return len(messages) + sum(len(m.content) for m in messages if isinstance(m.content, list))


def _reading(use: ToolUse, taught: str | None) -> ToolReading:
    if use.forced:  # whatever the model was taught: plain JSON is what a schema can ask for
        return ToolReading("json", use.parallel, use.named, calls_schema(use))
    return ToolReading(taught or fallback.FORMAT, parallel=use.parallel, named=use.named)


def _template(front: Front, body: ChatCompletionRequest) -> str | None:
    template = body.chat_template
    if template is None:
        return None
    if not front.config.trust_request_chat_template:
        raise InvalidRequestError(
            "'chat_template' is not taken from requests here; the server allows it with "
            "--trust-request-chat-template.",
            param="chat_template",
        )
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"'chat_template' takes at most {_MAX_TEMPLATE_CHARS} characters, got {len(template)}.",
            param="chat_template",
        )
    return template


def _effort(
    body: ChatCompletionRequest, tokenizer: Tokenizer, template: str | None
) -> dict[str, Any]:
    """Return ``reasoning_effort`` for a template that knows it; any other model has no choice."""
    name, effort = "reasoning_effort", body.reasoning_effort
    if effort is None:
        return {}
    if _mentions(tokenizer, template, name):
        return {name: effort}
    if effort == "none":
        return {}
    raise InvalidRequestError(
        f"'{name}' with this value is not supported: this model has one way to think at most.",
        param=name,
    )


def _documents(
    body: ChatCompletionRequest, tokenizer: Tokenizer, template: str | None
) -> dict[str, Any]:
    """Return ``documents`` for a template that knows them; any other would leave them out."""
    name = "documents"
    if not body.documents:
        return {}
    if _mentions(tokenizer, template, name):
        return {name: body.documents}
    raise InvalidRequestError(
        f"'{name}' are not supported: this model's chat template does not know them.", param=name
    )


def _echo(body: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str | None:
    """Return what is repeated: the last message, if the answer goes on in the same role (vLLM)."""
    last = messages[-1]
    return last["content"] if body.echo and last["role"] == "assistant" else None


def _thinking(
    body: ChatCompletionRequest, tokenizer: Tokenizer, template: str | None, read: str
) -> Thinking | None:
    if not _mentions(tokenizer, template, reasoning.END):
        return None
    told = body.include_reasoning is not False
    if body.continue_final_message:
        return Thinking(reasoning.is_open(read), told)
    inside, over = (read.rstrip().endswith(mark) for mark in (reasoning.BEGIN, reasoning.END))
    return Thinking(inside, told, may_begin=not (inside or over))


def _mentions(tokenizer: Tokenizer, template: str | None, word: str) -> bool:
    return tokenizer.template_mentions(word) if template is None else word in template
