"""The logprobs of a step's rows as what the wire carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.outputs import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.engine_proc.input_batch import BuiltStep
    from trioengine.engine_proc.runner import RowLogprobs, StepResult

__all__ = ["note_scores", "told_samples"]


def note_scores(built: BuiltStep, result: StepResult) -> None:
    """Note what the step found of prompts' own tokens."""
    row = len(built.sampled)
    for span in built.scored:
        counts = [span.request.params.prompt_logprobs or 0] * span.num_tokens
        rows = slice(row, row + span.num_tokens)
        row += span.num_tokens
        if span.request.prompt_logprobs is not None:
            span.request.prompt_logprobs += _told_rows(result, counts, rows)


def told_samples(built: BuiltStep, result: StepResult) -> list[TokenLogprob | None]:
    """Return what each request that samples is told of its token."""
    num_rows, wanted = len(built.sampled), built.batch.sampling.logprobs_k
    if wanted is None:
        return [None] * num_rows
    return _told_rows(result, wanted[:num_rows].tolist(), slice(num_rows))


def _told_rows(result: StepResult, counts: Sequence[int], rows: slice) -> list[TokenLogprob | None]:
    """Return what these rows are told of their tokens.

    Args:
        result: Of a step with logprobs.
        counts: How many likeliest tokens each of the rows wants; -1: nothing at all.
        rows: Which rows.
    """
    if result.logprobs is None:
        return [None] * len(counts)
    return _told(result.logprobs, result.tokens[rows].tolist(), counts, rows)


def _told(
    found: RowLogprobs, tokens: list[int], counts: Sequence[int], rows: slice
) -> list[TokenLogprob | None]:
    chosen, ranks = found.chosen[rows].tolist(), found.ranks[rows].tolist()
    ids, top = found.top_ids[rows].tolist(), found.top[rows].tolist()
    return [
        None if count < 0 else TokenLogprob(token, logprob, rank, _pairs(row_ids, row_top, count))
        for token, logprob, rank, row_ids, row_top, count in zip(
            tokens, chosen, ranks, ids, top, counts, strict=True
        )
    ]


def _pairs(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    pairs = list(zip(ids[:count], values[:count], strict=True))
    while pairs and pairs[-1][0] < 0:  # the vocabulary has no more tokens
        pairs.pop()
    return pairs
