"""What clients send and get, field by field under the names that OpenAI and vLLM gave them.

Bodies are decoded straight into these types, so a wrong type is found, and named, while parsing.
``None`` means "not said", as many clients write ``null`` for a default.

A field typed ``Raw`` is a parameter that is known here and not honoured yet. It stays undecoded:
only a value that would change nothing is let pass (``UNSUPPORTED``), any other is refused by name,
because ignoring it would give a different answer than the one asked for.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

__all__ = [
    "IGNORED",
    "UNSUPPORTED",
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "ContentPart",
    "GenerationRequest",
    "ModelCard",
    "ModelList",
    "PromptTokensDetails",
    "ReplyMessage",
    "StreamOptions",
    "UsageInfo",
]

NOT_SAID: Final = Raw()

# Accepted, and without any effect on the answer: labels for a provider's accounts and caches.
IGNORED: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "session_id",
    }
)  # fmt: skip

# Field -> values that change nothing, besides null. Any other value is a 400 that names the field.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "structured_outputs": (),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    "response_format": ({"type": "text"},),
    # Chat only.
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "reasoning_effort": ("none",),
    "include_reasoning": (True, False),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``: a usage chunk at the end, or not."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both generating endpoints take. ``timeout`` is seconds, queue and prefill included."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None

    frequency_penalty: Raw = NOT_SAID
    presence_penalty: Raw = NOT_SAID
    repetition_penalty: Raw = NOT_SAID
    length_penalty: Raw = NOT_SAID
    logit_bias: Raw = NOT_SAID
    use_beam_search: Raw = NOT_SAID
    echo: Raw = NOT_SAID
    include_stop_str_in_output: Raw = NOT_SAID
    skip_special_tokens: Raw = NOT_SAID
    spaces_between_special_tokens: Raw = NOT_SAID
    truncate_prompt_tokens: Raw = NOT_SAID
    truncation_side: Raw = NOT_SAID
    allowed_token_ids: Raw = NOT_SAID
    bad_words: Raw = NOT_SAID
    prompt_logprobs: Raw = NOT_SAID
    logprob_token_ids: Raw = NOT_SAID
    structured_outputs: Raw = NOT_SAID
    response_format: Raw = NOT_SAID
    request_id: Raw = NOT_SAID
    return_tokens_as_token_ids: Raw = NOT_SAID
    return_token_ids: Raw = NOT_SAID
    cache_salt: Raw = NOT_SAID
    kv_transfer_params: Raw = NOT_SAID
    vllm_xargs: Raw = NOT_SAID
    repetition_detection: Raw = NOT_SAID
    thinking_token_budget: Raw = NOT_SAID
    stream_interval: Raw = NOT_SAID


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    ``prompt`` is text, token ids, or a list of either; it stays undecoded here because a list of
    ids may be long: ``prompts.py`` takes it apart within bounds.
    """

    prompt: Raw = NOT_SAID
    logprobs: int | None = None

    best_of: Raw = NOT_SAID
    suffix: Raw = NOT_SAID
    prompt_embeds: Raw = NOT_SAID


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function that the model called: ``arguments`` is JSON in a string."""

    name: str
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in the history of a conversation."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    ``chat_template_kwargs`` stays undecoded until its size has been looked at.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Raw = NOT_SAID
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Raw = NOT_SAID
    tool_choice: Raw = NOT_SAID
    functions: Raw = NOT_SAID
    function_call: Raw = NOT_SAID
    parallel_tool_calls: Raw = NOT_SAID
    reasoning_effort: Raw = NOT_SAID
    include_reasoning: Raw = NOT_SAID
    verbosity: Raw = NOT_SAID
    modalities: Raw = NOT_SAID
    audio: Raw = NOT_SAID
    prediction: Raw = NOT_SAID
    web_search_options: Raw = NOT_SAID
    continue_final_message: Raw = NOT_SAID
    documents: Raw = NOT_SAID
    chat_template: Raw = NOT_SAID
    mm_processor_kwargs: Raw = NOT_SAID


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
    """One sequence; ``index`` is prompt · n + k. ``stop_reason`` is vLLM's."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str
    stop_reason: int | str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/completions`` without ``stream``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class ReplyMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One reply. ``stop_reason`` is vLLM's."""

    index: int
    message: ReplyMessage
    logprobs: None = None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/chat/completions`` without ``stream``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageInfo


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
