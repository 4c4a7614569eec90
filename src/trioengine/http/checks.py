"""Whether a body's values can be honoured: all of it before a character is tokenised. Pure.

Types were checked while decoding; ``SamplingParams`` knows the ranges of what the engine is told.
What is left is checked here: what concerns this endpoint, or several values together.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeVar

from trioengine.errors import InvalidRequestError
from trioengine.http.structured import read_structured
from trioengine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_TOKENS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trioengine.http.schemas import (
        ChatCompletionRequest,
        CompletionRequest,
        GenerationRequest,
    )
    from trioengine.protocol import ModelInfo

__all__ = [
    "TokenLimit",
    "check_chat",
    "check_completion",
    "check_model",
    "check_scheduling",
    "checked_params",
]

MAX_TEMPERATURE: Final = 2.0
MAX_PRIORITY: Final = 2**31 - 1
MAX_TIMEOUT_S: Final = 10_000_000.0
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_LENGTH: Final = 256  # characters
MAX_ALLOWED_IDS: Final = 2**19  # of all sequences together: each carries its own list

Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many output tokens a client wants.

    Attributes:
        requested: Said by the client; must fit. ``None``: as many as ``default`` and the model's
            length allow.
        default: Upper bound where the client said nothing; ``None`` fills up to the limit.
        param: Under which name the client said it, for errors.
        prompt_param: What to call too long.
    """

    requested: int | None
    default: int | None
    param: str
    prompt_param: str


def check_model(asked: str | None, served: Sequence[str]) -> str:
    """Return the name to answer under: the one asked for, or the first served.

    Raises:
        InvalidRequestError: No model of that name is served (404).
    """
    if asked is None:
        return served[0]
    if asked not in served:
        raise InvalidRequestError(
            f"The model '{asked[:200]}' does not exist here; available: {', '.join(served)}.",
            param="model",
            code="model_not_found",
            http_status=404,
        )
    return asked


def check_completion(body: CompletionRequest) -> None:
    """Check what only completions have.

    Raises:
        InvalidRequestError: A value is out of range, or two don't go together.
    """
    _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    _check_range("n", body.n, 1, MAX_N)
    if body.best_of is None:
        return
    n = body.n or 1
    _check_range("best_of", body.best_of, n, MAX_N)
    if body.stream and body.best_of > n:
        raise InvalidRequestError(
            f"best_of ({body.best_of}) must equal n ({n}) with 'stream': true: which sequences are "
            "the best is known only at the end",
            param="best_of",
        )


def check_chat(body: ChatCompletionRequest) -> None:
    """Check what only chats have.

    Raises:
        InvalidRequestError: A value is out of range, or two don't go together.
    """
    _check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' is only allowed with 'logprobs': true.", param="top_logprobs"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "'continue_final_message' goes on with the last message, 'add_generation_prompt' "
            "begins another: they cannot both be true.",
            param="continue_final_message",
        )


def checked_params(
    body: GenerationRequest,
    limit: TokenLimit,
    info: ModelInfo,
    *,
    max_sequences: int,
    num_prompts: int,
) -> SamplingParams:
    """Check what needs no tokens, and return the parameters but for what tokens decide.

    ``n`` is what each prompt gets, and ``max_tokens`` may still be more than fits.

    Raises:
        InvalidRequestError: A value is out of range; ``param`` names it.
    """
    _check_stream(body)
    if body.cache_salt == "":
        raise InvalidRequestError("cache_salt must not be empty", param="cache_salt")
    _check_range("temperature", body.temperature, 0.0, MAX_TEMPERATURE)
    check_scheduling(body.priority, body.timeout)
    _check_truncation(body.truncate_prompt_tokens, info.max_model_len)
    _check_bad_words(body.bad_words or ())
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_ids(name, getattr(body, name) or (), info.vocab_size)
    params = _sampling_params(body, limit)
    num_sequences = num_prompts * params.n
    if num_sequences > max_sequences:
        raise InvalidRequestError(
            f"This request asks for {num_sequences} sequences (prompts times n); this server holds "
            f"at most {max_sequences}.",
            param="n" if params.n > 1 else "prompt",
        )
    _check_allowed(len(params.allowed_token_ids or ()), num_sequences)
    return params


def check_scheduling(priority: int | None, timeout_s: float | None) -> None:
    """Check when a request wants to be served.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    _check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if timeout_s is not None and not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout must be in (0, {MAX_TIMEOUT_S:g}] seconds, got {timeout_s:g}",
            param="timeout",
        )


def _sampling_params(body: GenerationRequest, limit: TokenLimit) -> SamplingParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    allowed = body.allowed_token_ids
    # More than any model holds is too much for this one: said when the prompt's length is known.
    max_tokens = limit.default if limit.requested is None else min(limit.requested, MAX_TOKENS)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(body.min_tokens, 0),
            temperature=_or(body.temperature, 1.0),
            top_p=_or(body.top_p, 1.0),
            top_k=_or(body.top_k, 0),
            min_p=_or(body.min_p, 0.0),
            seed=body.seed,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            n=body.sequences_per_prompt,
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=body.logit_bias or {},
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_prompt_logprobs,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            structured=read_structured(body),
            cache_salt=body.cache_salt or "",
        )
    except InvalidRequestError as error:
        if error.param not in ("max_tokens", "min_tokens"):
            raise
        raise _in_the_clients_words(error, limit.param) from None


def _in_the_clients_words(error: InvalidRequestError, name: str) -> InvalidRequestError:
    """Return a complaint about ``max_tokens`` under the ``name`` that the client knows it by."""
    param = name if error.param == "max_tokens" else error.param
    return InvalidRequestError(error.message.replace("max_tokens", name), param=param)


def _check_stream(body: GenerationRequest) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "'prompt_logprobs' are not available with 'stream': true.", param="prompt_logprobs"
        )
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise InvalidRequestError(
            "'stream_options' is only allowed with 'stream': true.", param="stream_options"
        )
    if options.include_obfuscation:
        raise InvalidRequestError(
            "'stream_options.include_obfuscation' is not supported by this server.",
            param="stream_options.include_obfuscation",
        )


def _check_truncation(num_tokens: int | None, max_model_len: int) -> None:
    if num_tokens is not None and num_tokens != -1 and not 1 <= num_tokens <= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be in [1, {max_model_len}], or -1 for what fits, "
            f"got {num_tokens}",
            param="truncate_prompt_tokens",
        )


def _check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words takes at most {MAX_BAD_WORDS} strings, got {len(words)}", param="bad_words"
        )
    for word in words:
        if not (word.strip() and len(word) <= MAX_BAD_WORD_LENGTH):
            raise InvalidRequestError(
                f"each of bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters, and not only "
                f"white space, got {len(word)}",
                param="bad_words",
            )


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if len(token_ids) > vocab_size:
        raise InvalidRequestError(
            f"{name} takes at most the {vocab_size} ids of the vocabulary, got {len(token_ids)}",
            param=name,
        )
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} must be in [0, {vocab_size}), got {token_id}", param=name
            )


def _check_allowed(num_ids: int, num_sequences: int) -> None:
    if num_sequences > 1 and num_ids * num_sequences > MAX_ALLOWED_IDS:
        raise InvalidRequestError(
            f"allowed_token_ids takes at most {MAX_ALLOWED_IDS // num_sequences} ids with "
            f"{num_sequences} sequences (prompts times n), got {num_ids}",
            param="allowed_token_ids",
        )


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], got {value}", param=name)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
