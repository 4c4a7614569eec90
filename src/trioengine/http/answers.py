"""What clients get, field by field under the names that OpenAI and vLLM gave them.

Fields that only some requests ask for are ``UNSET`` elsewhere, and then absent.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trioengine.http.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "Completion",
    "CompletionChoice",
    "MadeFunction",
    "MadeToolCall",
    "ModelCard",
    "ModelList",
    "PromptLogprobs",
    "PromptTokensDetails",
    "ReplyMessage",
    "UsageInfo",
]

PromptLogprobs = list[dict[int, PromptLogprob] | None]


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, how many the prefix cache already held."""

    cached_tokens: int


class UsageInfo(msgspec.Struct, kw_only=True):
    """Tokens of the whole request: each prompt once, whatever ``n``; all outputs together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sequence; ``index`` is prompt · n + k. ``stop_reason`` and what follows it are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/completions`` without ``stream``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class MadeFunction(msgspec.Struct):
    """A function that is to be called. ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class MadeToolCall(msgspec.Struct, kw_only=True):
    """A call that the model makes; its result is to name the ``id``."""

    id: str
    type: str = "function"
    function: MadeFunction


class ReplyMessage(msgspec.Struct, kw_only=True):
    """What the model said, and what it thought before where it thinks aloud."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One reply. ``stop_reason`` is vLLM's."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/chat/completions`` without ``stream``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of ``/v1/models``. ``runner`` and ``simulated`` are ours, the rest as in vLLM."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "trioengine"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Any] = []
    runner: str
    simulated: bool


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelCard]
