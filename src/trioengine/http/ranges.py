"""What the values of a body may be, as its description says it.

The checks themselves are in ``checks`` and ``sampling_params``, which know more than one value at a
time; a test holds both to the same bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from trioengine.http.checks import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_PRIORITY,
    MAX_TEMPERATURE,
    MAX_TIMEOUT_S,
)
from trioengine.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    MIN_SEED,
)

__all__ = ["TokenId", "in_range"]

_N: Final = Meta(ge=1, le=MAX_N)
_LOGPROBS: Final = Meta(ge=0, le=MAX_LOGPROBS)
_PENALTY: Final = Meta(ge=-2.0, le=2.0)
_AT_LEAST_0: Final = Meta(ge=0)
_AT_LEAST_1: Final = Meta(ge=1)

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
_Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]

_METAS: Final[dict[tuple[str, Any], Meta]] = {
    ("max_tokens", int): _AT_LEAST_0,
    ("max_completion_tokens", int): _AT_LEAST_1,
    ("max_output_tokens", int): _AT_LEAST_1,
    ("min_tokens", int): _AT_LEAST_0,
    ("n", int): _N,
    ("best_of", int): _N,
    ("temperature", float): Meta(ge=0.0, le=MAX_TEMPERATURE),
    ("top_p", float): Meta(gt=0.0, le=1.0),
    ("top_k", int): Meta(ge=-1, le=MAX_TOKEN_ID),
    ("min_p", float): Meta(ge=0.0, le=1.0),
    ("seed", int): Meta(ge=MIN_SEED, le=MAX_SEED),
    ("presence_penalty", float): _PENALTY,
    ("frequency_penalty", float): _PENALTY,
    ("repetition_penalty", float): Meta(gt=0.0, le=2.0),
    ("logprobs", int): _LOGPROBS,
    ("top_logprobs", int): _LOGPROBS,
    ("prompt_logprobs", int): _LOGPROBS,
    ("priority", int): Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY),
    ("timeout", float): Meta(gt=0.0, le=MAX_TIMEOUT_S),
    ("truncate_prompt_tokens", int): Meta(ge=-1),
    ("dimensions", int): _AT_LEAST_1,
}
_TYPES: Final[dict[str, Any]] = {
    "stop": _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] | None,
    "stop_token_ids": Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None,
    "logit_bias": dict[int, _Bias] | None,
    "allowed_token_ids": Annotated[list[TokenId], Meta(min_length=1)] | None,
    "bad_words": Annotated[list[_BadWord], Meta(max_length=MAX_BAD_WORDS)] | None,
}


def in_range(name: str, kind: Any) -> Any:
    """Return ``kind``, the type of the field ``name``, with the bounds of its values."""
    if name in _TYPES:
        return _TYPES[name]
    for base in (int, float):
        if kind == base | None and (meta := _METAS.get((name, base))):
            return Annotated[base, meta] | None
    return kind
