"""How one sequence is to be sampled: checked once, immutable, and small on the wire."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.errors import InvalidRequestError
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = [
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_CACHE_SALT",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_SEED",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOKENS",
    "MAX_TOKEN_ID",
    "MIN_SEED",
    "SamplingParams",
]

MAX_ALLOWED_TOKEN_IDS: Final = 2**20
MAX_BAD_WORDS: Final = 256  # sequences of token ids: a word may stand with and without a space
MAX_BAD_WORD_TOKENS: Final = 256
MAX_CACHE_SALT: Final = 256  # characters
MAX_LOGIT_BIAS: Final = 1024
MAX_LOGPROBS: Final = 20
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
        max_tokens: Most output tokens, ≥ 1. ``None``: up to the model's length. 0 only together
            with ``prompt_logprobs``: the prompt is scored, and nothing is generated.
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
        presence_penalty: Taken once from the logit of every token of the output, in [-2, 2].
        frequency_penalty: Taken as often as the token is in the output, in [-2, 2].
        repetition_penalty: Divides a positive logit, and multiplies a negative one, of every token
            of prompt and output, in (0, 2].
        logit_bias: Token id to what is added to its logit, in [-100, 100].
        logprobs: Report log-probabilities: the sampled token's, and those of the so many likeliest
            tokens, in [0, 20]. They are the model's own, before everything else here.
        prompt_logprobs: The same for every token of the prompt but the first.
        allowed_token_ids: No other token may come, an end-of-sequence token neither.
        bad_words_token_ids: Sequences of token ids that the output may not hold.
        include_stop_str_in_output: The stop string, or the token that stopped it, is part of the
            text.
        skip_special_tokens: Special tokens are no part of the text.
        structured: What shape the text must have. The sequence ends as soon as nothing can follow,
            whatever ``min_tokens`` and ``ignore_eos`` say; end-of-sequence comes only where the
            text is complete.
        cache_salt: Prefixes are shared only between sequences of the same salt, so that how fast an
            answer begins tells nobody what others have asked (vLLM, RFC #16016).

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            fewest = 1 if self.prompt_logprobs is None else 0
            _check_int("max_tokens", self.max_tokens, fewest, MAX_TOKENS)
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
        self._check_penalties()
        self._check_vocabulary()
        if len(self.cache_salt) > MAX_CACHE_SALT:
            raise InvalidRequestError(
                f"cache_salt takes at most {MAX_CACHE_SALT} characters, got {len(self.cache_salt)}",
                param="cache_salt",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)

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
        _check_ids("stop_token_ids", self.stop_token_ids)

    def _check_penalties(self) -> None:
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 2.0:
            raise InvalidRequestError(
                f"repetition_penalty must be in (0, 2], got {self.repetition_penalty:g}",
                param="repetition_penalty",
            )

    def _check_vocabulary(self) -> None:
        """Check what names tokens. Whether the vocabulary has them is the engine's to say."""
        _check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids must not be empty", param="allowed_token_ids"
                )
            _check_length("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
            _check_ids("allowed_token_ids", self.allowed_token_ids)
        _check_length("bad_words", len(self.bad_words_token_ids), MAX_BAD_WORDS)
        for word in self.bad_words_token_ids:
            if not word:
                raise InvalidRequestError("a bad word must not be empty", param="bad_words")
            _check_length("bad_words: a word", len(word), MAX_BAD_WORD_TOKENS)
            _check_ids("bad_words", word)

    def check_token_ids(self, vocab_size: int) -> None:
        """Check that a vocabulary has every token that is named here.

        Raises:
            InvalidRequestError: It has not; ``param`` says where.
        """
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            *(("bad_words", word) for word in self.bad_words_token_ids),
        )
        for name, ids in named:
            if (largest := max(ids, default=0)) >= vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id {largest} is not in the vocabulary [0, {vocab_size})",
                    param=name,
                )

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature == 0.0


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _check_ids(name: str, token_ids: Collection[int]) -> None:
    if token_ids:  # its extremes say as much as each of what may be a whole vocabulary
        _check_int(name, min(token_ids), 0, MAX_TOKEN_ID)
        _check_int(name, max(token_ids), 0, MAX_TOKEN_ID)


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        raise InvalidRequestError(
            f"{name} takes at most {most} entries, got {length}", param=name.partition(":")[0]
        )


def _check_float(name: str, value: float, low: float, high: float) -> None:
    # Written as "lo <= x <= hi" so that NaN fails; infinity never passes either.
    if not (low <= value <= high and math.isfinite(value)):
        bounds = f"[{low:g}, {high:g}]" if math.isfinite(high) else f"[{low:g}, inf)"
        raise InvalidRequestError(f"{name} must be in {bounds}, got {value:g}", param=name)
