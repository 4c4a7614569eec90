"""A checked body and its tokens → sequences for the engine. Pure: no I/O, no clock, no tokenizer.

Everything that can be refused has been refused by the end of this, before the engine hears of the
request.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.client.engine_client import SequenceRequest
from trioengine.errors import InvalidRequestError
from trioengine.http.prompts import context_length_exceeded
from trioengine.sampling_params import MAX_SEED, MIN_SEED, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioengine.http.checks import TokenLimit
    from trioengine.http.details import Details
    from trioengine.http.schemas import GenerationRequest
    from trioengine.protocol import ModelInfo

__all__ = ["DEFAULT_MAX_TOKENS", "Job", "bad_word_ids", "fan_out", "make_job", "truncator"]

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, for completions


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready for the engine.

    Attributes:
        sequences: Sequence k of prompt i at i · best_of + k.
        n: Choices per prompt; choice k of prompt i has index i · n + k.
        best_of: Sequences per prompt, of which the ``n`` best are the choices.
        prompt_tokens: Of all prompts, each counted once.
        model: The name to answer under.
        stream: Whether to answer in events.
        include_usage: Whether the stream ends with a usage chunk.
        priority: Lower runs first among requests that wait.
        timeout_s: Total time allowed from arrival on; ``None`` for no bound.
        details: What the answer carries beside text; ``None`` for nothing.
    """

    sequences: list[SequenceRequest]
    n: int
    best_of: int
    prompt_tokens: int
    model: str
    stream: bool
    include_usage: bool
    priority: int
    timeout_s: float | None
    details: Details | None = None


def make_job(
    body: GenerationRequest,
    params: SamplingParams,
    prompts: list[list[int]],
    limit: TokenLimit,
    info: ModelInfo,
    model: str,
    details: Details | None = None,
) -> Job:
    """Return the job for these tokenised prompts.

    Args:
        body: Checked.
        params: What ``checked_params`` has made of it, with the ids of its bad words.
        prompts: Token ids.
        limit: Of output tokens.
        info: The model.
        model: The name to answer under.
        details: See ``Job``.

    Raises:
        InvalidRequestError: A prompt and its output don't fit the model.
    """
    sequences: list[SequenceRequest] = []
    fitted = {params.max_tokens: params}  # most prompts of a batch share theirs
    for prompt in prompts:
        max_tokens = _output_tokens(len(prompt), limit, info)
        if max_tokens not in fitted:
            fitted[max_tokens] = msgspec.structs.replace(params, max_tokens=max_tokens)
        sequences += fan_out(prompt, fitted[max_tokens])
    options = body.stream_options
    return Job(
        sequences=sequences,
        n=body.n or 1,
        best_of=params.n,
        prompt_tokens=sum(map(len, prompts)),
        model=model,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        details=details,
    )


def truncator(
    body: GenerationRequest, limit: TokenLimit, info: ModelInfo
) -> Callable[[list[int]], list[int]]:
    """Return what cuts a prompt as ``truncate_prompt_tokens`` says.

    Of a prompt that is too long the end is kept, unless ``truncation_side`` is ``right``.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return list
    if most == -1:
        most = max(1, info.max_model_len - (1 if limit.requested is None else limit.requested))
    return (lambda ids: ids[:most]) if body.truncation_side == "right" else lambda ids: ids[-most:]


def bad_word_ids(
    words: Iterable[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, as it stands at the start of a text and within one.

    Source: vLLM, ``SamplingParams.update_from_tokenizer``.

    Raises:
        InvalidRequestError: A word has no tokens.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not bare or not spaced:
            raise InvalidRequestError(
                f"bad_words: this model has no tokens for {word[:50]!r}", param="bad_words"
            )
        spellings.append(bare)
        # Longer with a space: then the space is a token of its own, and `bare` follows it.
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            spellings.append(spaced)
    return tuple(spellings)


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


def fan_out(prompt: list[int], params: SamplingParams) -> list[SequenceRequest]:
    """Return one sequence per choice; with a seed, each has its own so that they differ."""
    if params.n == 1:
        return [SequenceRequest(prompt, params)]
    single = msgspec.structs.replace(params, n=1)
    return [SequenceRequest(prompt, _reseeded(single, k)) for k in range(params.n)]


def _reseeded(params: SamplingParams, k: int) -> SamplingParams:
    """Return ``params`` for choice ``k``, without checking again what may be long lists."""
    if params.seed is None or k == 0:
        return params
    seed = params.seed + k
    other = copy.copy(params)
    msgspec.structs.force_setattr(
        other, "seed", seed if seed <= MAX_SEED else MIN_SEED + (seed - MAX_SEED - 1)
    )
    return other
