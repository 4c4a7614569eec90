"""Log-probabilities of a prompt's own tokens: rows of logits whose token is given.

A chunk of a prompt computes the logits of all its tokens anyway as far as the last layer; where a
request asks for them, each token but the last becomes a row whose target is the token after it.
What a step finds is appended to the request, so that after a preemption only what is missing is
asked for again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from trioengine.engine_proc.runner import AllowMasks, LogitBias, Penalties, SamplingRows
from trioengine.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.runner import StepBatch
    from trioengine.engine_proc.scheduler import PrefillChunk

    Int32Array = npt.NDArray[np.int32]

__all__ = ["ScoredSpan", "add_scored_rows", "scored_spans"]


@dataclasses.dataclass(slots=True)
class ScoredSpan:
    """Tokens ``first .. first + num_tokens`` of a request's prompt, to be scored in a step.

    Attributes:
        request: Whose they are.
        first: Index of the first one in its sequence.
        num_tokens: How many.
        flat: Index, in the flat batch, of the token before the first one.
    """

    request: Request
    first: int
    num_tokens: int
    flat: int

    @property
    def targets(self) -> Int32Array:
        """The tokens."""
        tokens = self.request.tokens[self.first : self.first + self.num_tokens]
        return np.array(tokens, np.int32)


def scored_spans(chunks: Sequence[PrefillChunk], flat_starts: Sequence[int]) -> list[ScoredSpan]:
    """Return what is to be scored of these chunks, whose tokens begin at ``flat_starts``.

    Raises:
        InternalError: Tokens that are still to be scored were passed over.
    """
    spans = []
    for chunk, flat_start in zip(chunks, flat_starts, strict=True):
        request = chunk.request
        if not request.needs_all_logits or request.prompt_logprobs is None:
            continue
        first = len(request.prompt_logprobs)
        if request.num_computed >= first:
            raise InternalError(f"{request!r} is scored up to {first} only")
        end = min(request.num_computed + chunk.num_tokens + 1, request.num_prompt_tokens)
        if first < end:
            flat = flat_start + first - 1 - request.num_computed
            spans.append(ScoredSpan(request, first, end - first, flat))
    return spans


def add_scored_rows(batch: StepBatch, spans: Sequence[ScoredSpan]) -> None:
    """Append a row for every scored token behind the rows that sample."""
    flats = [np.arange(span.flat, span.flat + span.num_tokens, dtype=np.int32) for span in spans]
    batch.logits_rows = np.concatenate([batch.logits_rows, *flats])
    batch.sampling = _extended(batch.sampling, spans)


def _extended(rows: SamplingRows, spans: Sequence[ScoredSpan]) -> SamplingRows:
    sizes = [span.num_tokens for span in spans]
    count, before = sum(sizes), len(rows.temperature)
    wanted = [span.request.params.prompt_logprobs or 0 for span in spans]
    none = np.full(before, -1, np.int32)
    asked = none if rows.logprobs_k is None else rows.logprobs_k
    first = [np.arange(span.first, span.first + span.num_tokens, dtype=np.int64) for span in spans]
    ids = [span.request.request_id for span in spans]
    return SamplingRows(
        temperature=np.append(rows.temperature, np.zeros(count, np.float32)),
        top_p=np.append(rows.top_p, np.ones(count, np.float32)),
        top_k=np.append(rows.top_k, np.zeros(count, np.int32)),
        min_p=np.append(rows.min_p, np.zeros(count, np.float32)),
        seeds=np.append(rows.seeds, np.repeat(_seeds(spans), sizes)),
        positions=np.concatenate([rows.positions, *first]),
        request_ids=np.append(rows.request_ids, np.repeat(np.array(ids, np.int64), sizes)),
        all_greedy=rows.all_greedy,
        masked_token_ids=rows.masked_token_ids,
        allow=_longer_masks(rows.allow, count),
        bias=_longer_bias(rows.bias, count),
        penalties=_longer_penalties(rows.penalties, count),
        logprobs_k=np.append(asked, np.repeat(np.array(wanted, np.int32), sizes)),
        targets=np.concatenate([none, *(span.targets for span in spans)]),
    )


def _seeds(spans: Sequence[ScoredSpan]) -> npt.NDArray[np.uint64]:
    return np.array([span.request.seed for span in spans], np.uint64)


def _longer_masks(allow: AllowMasks | None, count: int) -> AllowMasks | None:
    if allow is None:
        return None
    row_masks = np.append(allow.row_masks, np.full(count, -1, np.int32))
    return AllowMasks(allow.words, row_masks, allow.filling)


def _longer_bias(bias: LogitBias | None, count: int) -> LogitBias | None:
    if bias is None:
        return None
    return LogitBias(_longer_starts(bias.starts, count), bias.token_ids, bias.values)


def _longer_penalties(penalties: Penalties | None, count: int) -> Penalties | None:
    if penalties is None:
        return None
    nothing = np.zeros(count, np.float32)
    return Penalties(
        presence=np.append(penalties.presence, nothing),
        frequency=np.append(penalties.frequency, nothing),
        repetition=np.append(penalties.repetition, np.ones(count, np.float32)),
        starts=_longer_starts(penalties.starts, count),
        token_ids=penalties.token_ids,
        counts=penalties.counts,
    )


def _longer_starts(starts: Int32Array, count: int) -> Int32Array:
    return np.append(starts, np.full(count, starts[-1], np.int32))
