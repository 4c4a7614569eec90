"""What clients send, field by field under the names that OpenAI and vLLM gave them.

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

from trioengine.http.tools.request import Tool, ToolChoice

__all__ = [
    "IGNORED",
    "UNSUPPORTED",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "ContentPart",
    "GenerationRequest",
    "StreamOptions",
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
    "length_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "request_id": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    # Chat only.
    "functions": (),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``: a usage chunk at the end, and if so, usage so far on every other one."""

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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    response_format: Raw = NOT_SAID
    structured_outputs: Raw = NOT_SAID
    guided_json: Raw = NOT_SAID
    guided_regex: Raw = NOT_SAID
    guided_choice: Raw = NOT_SAID
    guided_grammar: Raw = NOT_SAID

    length_penalty: Raw = NOT_SAID
    use_beam_search: Raw = NOT_SAID
    spaces_between_special_tokens: Raw = NOT_SAID
    logprob_token_ids: Raw = NOT_SAID
    request_id: Raw = NOT_SAID
    kv_transfer_params: Raw = NOT_SAID
    vllm_xargs: Raw = NOT_SAID
    repetition_detection: Raw = NOT_SAID
    thinking_token_budget: Raw = NOT_SAID
    stream_interval: Raw = NOT_SAID

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk of a stream is to carry the token counts."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are to be reported beside each; ``None`` for no logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt, as the engine has to know it."""
        return self.prompt_logprobs

    @property
    def sequences_per_prompt(self) -> int:
        """How many are generated, shown or not."""
        return 1 if self.n is None else self.n


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    ``prompt`` is text, token ids, or a list of either; it stays undecoded here because a list of
    ids may be long: ``prompts.py`` takes it apart within bounds.
    """

    prompt: Raw = NOT_SAID
    logprobs: int | None = None
    best_of: int | None = None

    suffix: Raw = NOT_SAID
    prompt_embeds: Raw = NOT_SAID

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.picks_best else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo has logprobs too; and without output, the prompt's are what is computed."""
        asked = [self.prompt_logprobs]
        if self.echo:
            asked += [self.logprobs, 0 if self.max_tokens == 0 else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def sequences_per_prompt(self) -> int:
        return super().sequences_per_prompt if self.best_of is None else self.best_of

    @property
    def picks_best(self) -> bool:
        """Whether more sequences are generated than shown."""
        return self.sequences_per_prompt != super().sequences_per_prompt


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
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Raw = NOT_SAID
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    functions: Raw = NOT_SAID
    function_call: Raw = NOT_SAID
    verbosity: Raw = NOT_SAID
    modalities: Raw = NOT_SAID
    audio: Raw = NOT_SAID
    prediction: Raw = NOT_SAID
    web_search_options: Raw = NOT_SAID
    mm_processor_kwargs: Raw = NOT_SAID

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
