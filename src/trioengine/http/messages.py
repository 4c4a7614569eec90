"""Chat messages as clients send them → as chat templates expect them. Pure.

Templates are written against tidy conversations: content is one string, roles are the ones the
model was trained on, tool arguments are objects. Clients replay whatever an API once gave them:
nulls, empty lists, parts, arguments as JSON in a string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.http.schemas import ChatMessage, ContentPart, ToolCall

__all__ = ["MAX_MESSAGES", "normalise", "template_arguments"]

MAX_MESSAGES: Final = 16_384
# Decoding is for the template's convenience; past this size the string goes in as it is.
_MAX_DECODED_BYTES: Final = 64 * 1024
_OWN_ARGUMENTS: Final = frozenset(
    {
        "self", "messages", "tools", "documents", "add_generation_prompt", "chat_template",
        "continue_final_message", "tokenize",
    }
)  # fmt: skip


def normalise(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for a template.

    ``developer`` becomes ``system``, parts become one string (joined by line breaks), null content
    the empty string, empty ``tool_calls`` nothing, tool arguments the object they spell.

    Raises:
        InvalidRequestError: None or too many messages, or a part that is not text.
    """
    if not messages:
        raise InvalidRequestError("'messages' must not be empty.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"'messages' takes at most {MAX_MESSAGES} messages, got {len(messages)}.",
            param="messages",
        )
    return [_normalise(message, number) for number, message in enumerate(messages)]


def template_arguments(raw: msgspec.Raw | None) -> dict[str, Any]:
    """Return ``chat_template_kwargs`` as a dict.

    Raises:
        InvalidRequestError: No object, over-long, or it names what has a parameter of its own.
    """
    name = "chat_template_kwargs"
    data = bytes(raw or b"null")
    try:
        value = msgspec.json.decode(data) if len(data) <= _MAX_DECODED_BYTES else "over-long"
    except (msgspec.MsgspecError, RecursionError):
        value = "undecodable"
    if value is None or value == {}:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{name}' must be a small object.", param=name)
    if taken := sorted(value.keys() & _OWN_ARGUMENTS):
        raise InvalidRequestError(f"'{name}' must not set {', '.join(taken)}.", param=name)
    return value


def _normalise(message: ChatMessage, number: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, number)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.reasoning is not None:
        turn.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return turn


def _text(content: str | list[ContentPart] | None, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(
        _part(part, f"messages[{number}].content[{i}]") for i, part in enumerate(content)
    )


def _part(part: ContentPart, param: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        wrong = "has no text" if part.type in {"text", "refusal"} else "is not supported"
        raise InvalidRequestError(
            f"A content part of type '{part.type[:50]}' {wrong}: this model reads text only.",
            param=param,
        )
    return text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": call.type, "function": function}


def _arguments(spelled: str | None) -> Any:
    """Return the object that ``spelled`` spells; what a model garbled stays a string."""
    if not spelled:
        return {}
    if len(spelled) > _MAX_DECODED_BYTES:
        return spelled
    try:
        return msgspec.json.decode(spelled)
    except (msgspec.MsgspecError, RecursionError):
        return spelled
