"""What some requests ask of the sampler beyond temperature, and the arrays that say so in a step.

Theory of operation
-------------------
Most requests have no ``SamplingExtras`` at all, and a step in which nobody has any builds none of
these arrays. What a request's extras remember (which tokens it has seen, which are allowed) is
worked out once, when it comes, and kept up token by token; a step only joins what its rows have.
They belong to the request and not to its row, so being preempted loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from trioengine.engine_proc.runner import AllowMasks, LogitBias, Penalties

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    import numpy.typing as npt

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.runner import SamplingRows
    from trioengine.sampling_params import SamplingParams

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]

__all__ = ["BadWords", "SamplingExtras", "TokenCounts", "add_extras", "allow_words", "row_starts"]

_NO_IDS: Final = np.empty(0, np.int32)
_NO_VALUES: Final = np.empty(0, np.float32)
_LEAST_REPETITION: Final = 1e-30  # no logit over it is infinite in float32


class TokenCounts:
    """The distinct tokens of a sequence, and how often each is in its output.

    Args:
        prompt: Tokens that count as seen although the output has none of them.
        num_seen: Tokens of the sequence to pass over: its prompt.
    """

    __slots__ = ("_counts", "_index", "_num_seen", "_token_ids")

    def __init__(self, prompt: Sequence[int], num_seen: int) -> None:
        distinct = np.unique(np.array(prompt, np.int32))
        self._index = {token: place for place, token in enumerate(distinct.tolist())}
        self._token_ids: Int32Array = np.concatenate([distinct, np.zeros(64, np.int32)])
        self._counts: Int32Array = np.zeros(len(self._token_ids), np.int32)
        self._num_seen = num_seen

    def catch_up(self, tokens: array[int]) -> None:
        """Count what the sequence has got since the last call."""
        for token in tokens[self._num_seen :]:
            place = self._index.setdefault(token, len(self._index))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token
            self._counts[place] += 1
        self._num_seen = len(tokens)

    @property
    def token_ids(self) -> Int32Array:
        """The distinct tokens in the order in which they were first seen; a view."""
        return self._token_ids[: len(self._index)]

    @property
    def counts(self) -> Int32Array:
        """How often each of ``token_ids`` is in the output; a view."""
        return self._counts[: len(self._index)]


class BadWords:
    """Token sequences that an output may not hold, found by the token before their last one."""

    __slots__ = ("_endings", "_single")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in words:
            if before:
                self._endings.setdefault(before[-1], []).append((before, last))

    def banned(self, tokens: array[int], num_prompt_tokens: int) -> list[int]:
        """Return the tokens that would complete a word whose beginning ends the output."""
        banned = list(self._single)
        if len(tokens) > num_prompt_tokens:
            for before, last in self._endings.get(tokens[-1], ()):
                start = len(tokens) - len(before)
                if start >= num_prompt_tokens and tokens[start:].tolist() == before:
                    banned.append(last)
        return banned


def allow_words(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Return an ``AllowMasks`` row that allows these tokens."""
    ids = np.array(token_ids, np.uint32)
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, ids >> np.uint32(5), np.uint32(1) << (ids & np.uint32(31)))
    return words


class SamplingExtras:
    """The extras of one request.

    Attributes:
        params: The request's own.
        counts: Where there are penalties.
        bad_words: Where there are any.
        bias_ids: int32, empty where there is no bias.
        bias_values: float32, beside ``bias_ids``.
        allowed: uint32, a row of ``AllowMasks``, where not all tokens may come.
    """

    __slots__ = ("allowed", "bad_words", "bias_ids", "bias_values", "counts", "params")

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.params = params
        self.counts = _counts(params, prompt)
        self.bad_words = (
            BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None
        )
        self.bias_ids: Int32Array = np.array(list(params.logit_bias), np.int32)
        self.bias_values: Float32Array = np.array(list(params.logit_bias.values()), np.float32)
        self.allowed: npt.NDArray[np.uint32] | None = None
        if params.allowed_token_ids is not None:
            self.allowed = allow_words(params.allowed_token_ids, vocab_size)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], vocab_size: int
    ) -> SamplingExtras | None:
        """Return a request's extras, ``None`` where it asks for nothing of the kind."""
        if (
            _penalises(params)
            or params.logit_bias
            or params.bad_words_token_ids
            or params.allowed_token_ids is not None
            or params.logprobs is not None
        ):
            return cls(params, prompt, vocab_size)
        return None


def _penalises(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _counts(params: SamplingParams, prompt: Sequence[int]) -> TokenCounts | None:
    if not _penalises(params):
        return None
    # Of the prompt only the repetition penalty takes notice.
    return TokenCounts(prompt if params.repetition_penalty != 1.0 else (), len(prompt))


# One step ----------------------------------------------------------------------------------------


def add_extras(rows: SamplingRows, requests: list[Request]) -> None:
    """Give the rows of a step what their requests ask for beyond the ordinary."""
    extras = [request.extras for request in requests]
    rows.masked_token_ids += _bans(requests)
    rows.allow = _allow(extras)
    rows.bias = _bias(extras)
    rows.penalties = _penalties(requests)
    wanted = [_num_logprobs(request.params) for request in requests]
    if max(wanted, default=-1) >= 0:
        rows.logprobs_k = np.array(wanted, np.int32)


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs


def _bans(requests: list[Request]) -> list[tuple[int, list[int]]]:
    bans = []
    for row, request in enumerate(requests):
        if request.extras is not None and request.extras.bad_words is not None:
            banned = request.extras.bad_words.banned(request.tokens, request.num_prompt_tokens)
            if banned:
                bans.append((row, banned))
    return bans


def _allow(extras: list[SamplingExtras | None]) -> AllowMasks | None:
    masks = [extra.allowed for extra in extras if extra is not None and extra.allowed is not None]
    if not masks:
        return None
    row_masks = np.full(len(extras), -1, np.int32)
    has_mask = [extra is not None and extra.allowed is not None for extra in extras]
    row_masks[has_mask] = np.arange(len(masks), dtype=np.int32)
    return AllowMasks(np.stack(masks), row_masks)


def _bias(extras: list[SamplingExtras | None]) -> LogitBias | None:
    ids = [_NO_IDS if extra is None else extra.bias_ids for extra in extras]
    starts = row_starts(ids)
    if not starts[-1]:
        return None
    values = [_NO_VALUES if extra is None else extra.bias_values for extra in extras]
    return LogitBias(starts, np.concatenate(ids), np.concatenate(values))


def _penalties(requests: list[Request]) -> Penalties | None:
    seen = [request.extras.counts if request.extras else None for request in requests]
    if not any(seen):
        return None
    for request, counts in zip(requests, seen, strict=True):
        if counts is not None:
            counts.catch_up(request.tokens)
    ids = [_NO_IDS if counts is None else counts.token_ids for counts in seen]
    params = [request.params for request in requests]
    return Penalties(
        presence=np.array([each.presence_penalty for each in params], np.float32),
        frequency=np.array([each.frequency_penalty for each in params], np.float32),
        repetition=np.array(
            [max(each.repetition_penalty, _LEAST_REPETITION) for each in params], np.float32
        ),
        starts=row_starts(ids),
        token_ids=np.concatenate(ids),
        counts=np.concatenate([_NO_IDS if counts is None else counts.counts for counts in seen]),
    )


def row_starts(parts: Sequence[Int32Array]) -> Int32Array:
    """Return where each part begins once they are joined, and the end: int32 ``[n + 1]``."""
    starts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=starts[1:])
    return starts
