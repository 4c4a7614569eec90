"""How one sequence is to be sampled: checked once, immutable, and small on the wire."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from trioengine.errors import InvalidRequestError

__all__ = [
    "MAX_N",
    "MAX_SEED",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MIN_SEED",
    "SamplingParams",
]

MAX_N: Final = 128
MAX_STOP_STRINGS: Final = 4
MAX_STOP_LENGTH: Final = 256  # characters
MAX_STOP_TOKEN_IDS: Final = 128
MAX_TOKEN_ID: Final = 2**31 - 1
MAX_TOKENS: Final = 2**31 - 1
MIN_SEED: Final = -(2**63)
MAX_SEED: Final = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one sequence, with the names that vLLM and OpenAI users know.

    Construction checks ranges, so a ``SamplingParams`` in hand is a valid one, in either process.

    Attributes:
        max_tokens: Most output tokens, ≥ 1. ``None``: up to the model's length.
        min_tokens: End-of-sequence and ``stop_token_ids`` are masked, and stop strings ignored,
            until this many tokens exist.
        temperature: 0 is greedy. In [0, 2] on HTTP; any finite value ≥ 0 here.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: Drop tokens less likely than ``min_p`` times the likeliest, in [0, 1].
        seed: Signed 64-bit. ``None`` draws one. Output depends on (seed, position) only, never on
            what shares the batch.
        stop: Strings that end the sequence; not part of the text.
        stop_token_ids: Token ids that end the sequence; not part of the text.
        ignore_eos: Do not end at the model's own end-of-sequence tokens.
        n: Sequences per prompt. The front end fans out: the engine only ever sees ``n == 1``.

    Raises:
        InvalidRequestError: A value is out of range; ``param`` names it.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        _check_float("temperature", self.temperature, 0.0, math.inf)
        if self.top_p <= 0.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], got {self.top_p:g}", param="top_p")
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, MAX_TOKEN_ID)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        _check_int("n", self.n, 1, MAX_N)
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}",
                param="stop",
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"each stop string must have 1 to {MAX_STOP_LENGTH} characters, "
                    f"got {len(text)}",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, "
                f"got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature == 0.0


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    # Written as "lo <= x <= hi" so that NaN fails; infinity never passes either.
    if not (low <= value <= high and math.isfinite(value)):
        bounds = f"[{low:g}, {high:g}]" if math.isfinite(high) else f"[{low:g}, inf)"
        raise InvalidRequestError(f"{name} must be in {bounds}, got {value:g}", param=name)
