"""A checked body → sequences for the engine. Pure: no I/O, no clock, no tokenizer.

Everything that can be refused is refused here, before the engine hears of the request.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from trioengine.client.engine_client import SequenceRequest
from trioengine.errors import InvalidRequestError
from trioengine.http.prompts import context_length_exceeded
from trioengine.sampling_params import MAX_SEED, MIN_SEED, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.http.schemas import GenerationRequest
    from trioengine.protocol import ModelInfo

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "Job",
    "TokenLimit",
    "check_common",
    "check_model",
    "fan_out",
    "make_job",
]

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, for completions
MAX_TEMPERATURE: Final = 2.0
MAX_PRIORITY: Final = 2**31 - 1
MAX_TIMEOUT_S: Final = 10_000_000.0

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


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready for the engine.

    Attributes:
        sequences: Sequence k of prompt i at i · n + k, which is also its choice's ``index``.
        n: Sequences per prompt.
        prompt_tokens: Of all prompts, each counted once.
        model: The name to answer under.
        stream: Whether to answer in events.
        include_usage: Whether the stream ends with a usage chunk.
        priority: Lower runs first among requests that wait.
        timeout_s: Total time allowed from arrival on; ``None`` for no bound.
    """

    sequences: list[SequenceRequest]
    n: int
    prompt_tokens: int
    model: str
    stream: bool
    include_usage: bool
    priority: int
    timeout_s: float | None


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


def check_common(body: GenerationRequest, *, max_sequences: int, num_prompts: int) -> None:
    """Check what needs no tokens, so that nothing is tokenised in vain.

    Raises:
        InvalidRequestError: A value is out of range; ``param`` names it.
    """
    _check_stream_options(body)
    _check_range("temperature", body.temperature, 0.0, MAX_TEMPERATURE)
    _check_range("priority", body.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if body.timeout is not None and not 0.0 < body.timeout <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout must be in (0, {MAX_TIMEOUT_S:g}] seconds, got {body.timeout:g}",
            param="timeout",
        )
    n = _sampling_params(body, None).n
    if num_prompts * n > max_sequences:
        raise InvalidRequestError(
            f"This request asks for {num_prompts * n} sequences (prompts times n); this server "
            f"holds at most {max_sequences}.",
            param="n" if n > 1 else "prompt",
        )


def make_job(
    body: GenerationRequest,
    prompts: list[list[int]],
    limit: TokenLimit,
    info: ModelInfo,
    model: str,
) -> Job:
    """Return the job for these tokenised prompts.

    Raises:
        InvalidRequestError: A prompt and its output don't fit the model, or a value is out of
            range.
    """
    _check_stop_ids(body, info.vocab_size)
    sequences: list[SequenceRequest] = []
    n = 1
    for prompt in prompts:
        params = _sampling_params(body, _output_tokens(len(prompt), limit, info), limit.param)
        n = params.n
        sequences += fan_out(prompt, params)
    options = body.stream_options
    return Job(
        sequences=sequences,
        n=n,
        prompt_tokens=sum(map(len, prompts)),
        model=model,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        priority=body.priority or 0,
        timeout_s=body.timeout,
    )


def _output_tokens(prompt_tokens: int, limit: TokenLimit, info: ModelInfo) -> int:
    room = info.max_model_len - prompt_tokens
    wanted = limit.requested if limit.requested is not None else 1
    if wanted > room:
        raise context_length_exceeded(
            info.max_model_len, prompt_tokens, wanted, param=limit.prompt_param
        )
    if limit.requested is not None:
        return limit.requested
    return room if limit.default is None else min(limit.default, room)


def _sampling_params(
    body: GenerationRequest, max_tokens: int | None, param: str = "max_tokens"
) -> SamplingParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
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
            n=_or(body.n, 1),
        )
    except InvalidRequestError as error:
        if error.param == "max_tokens":
            error.param = param  # the name that the client used
        raise


def fan_out(prompt: list[int], params: SamplingParams) -> list[SequenceRequest]:
    """Return one sequence per choice; with a seed, each has its own so that they differ."""
    if params.n == 1:
        return [SequenceRequest(prompt, params)]
    return [
        SequenceRequest(
            prompt, msgspec.structs.replace(params, n=1, seed=_nth_seed(params.seed, k))
        )
        for k in range(params.n)
    ]


def _nth_seed(seed: int | None, k: int) -> int | None:
    if seed is None:
        return None
    return seed + k if seed + k <= MAX_SEED else MIN_SEED + (seed + k - MAX_SEED - 1)


def _check_stream_options(body: GenerationRequest) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise InvalidRequestError(
            "'stream_options' is only allowed with 'stream': true.", param="stream_options"
        )
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise InvalidRequestError(
                f"'stream_options.{name}' is not supported by this server.",
                param=f"stream_options.{name}",
            )


def _check_stop_ids(body: GenerationRequest, vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in body.stop_token_ids or ()):
        raise InvalidRequestError(
            f"stop_token_ids must be in [0, {vocab_size})", param="stop_token_ids"
        )


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], got {value}", param=name)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
