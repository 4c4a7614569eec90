"""Telling and gathering for requests that want more than text: ``narrate``, in pieces. Pure.

Kept apart so that a request for plain text pays for none of it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from trioengine.http.details import Story
from trioengine.http.narrate import Collection, Narration
from trioengine.outputs import LEAST_LOGPROB, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.http.convert import Job
    from trioengine.http.details import Details
    from trioengine.http.narrate import Deltas
    from trioengine.http.replies import Choice, Replies
    from trioengine.outputs import TokenLogprob

__all__ = ["collection_of", "narration_of"]


def narration_of(job: Job, replies: Replies) -> Narration:
    """Return what tells the events of ``job``."""
    if job.details is None:
        return Narration(job, replies)
    return _DetailedNarration(job, replies, job.details)


def collection_of(job: Job) -> Collection:
    """Return what gathers the answer to ``job``."""
    if job.details is None:
        return Collection(job)
    return _DetailedCollection(job, job.details)


class _DetailedNarration(Narration):
    def __init__(self, job: Job, replies: Replies, details: Details) -> None:
        super().__init__(job, replies)
        self._tells_usage = details.usage_so_far
        self._stories = [
            Story(details, details.prompts[index // job.best_of])
            for index in range(len(job.sequences))
        ]

    def tell(self, deltas: Deltas) -> bytes:
        replies, events = self._replies, []
        for index, delta in deltas:
            self._note(index, delta)
            if self._tells_usage:
                replies.usage_so_far(self.tally.usage)
            if index not in self._begun:
                self._begun.add(index)
                events.append(replies.opening(index))
            story = self._stories[index]
            piece = story.take(delta)
            if piece is not None and piece.says_something:
                plain = piece.plain and not self._tells_usage
                told = replies.text(index, piece.text) if plain else replies.piece(index, piece)
                events.append(told)
                piece = None
            if delta.finish_reason is not None:
                reason = story.reason(delta.finish_reason)
                events.append(replies.finish(index, reason, delta.stop_reason, piece))
        return b"".join(events)


class _DetailedCollection(Collection):
    def __init__(self, job: Job, details: Details) -> None:
        super().__init__(job)
        self._details = details
        self._n, self._best_of = job.n, job.best_of
        self._token_ids: list[list[int]] = [[] for _ in job.sequences]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in job.sequences]
        self._scored: dict[int, list[TokenLogprob | None]] = {}

    def add(self, deltas: Deltas) -> None:
        super().add(deltas)
        for index, delta in deltas:
            self._token_ids[index] += delta.token_ids
            self._logprobs[index] += delta.logprobs or ()
            if delta.prompt_logprobs is not None:
                self._scored[index] = delta.prompt_logprobs

    def choices(self) -> Sequence[Choice]:
        self._check_whole()
        return [
            self._choice(index)
            for first in range(0, len(self._texts), self._best_of)
            for index in self._best(range(first, first + self._best_of))
        ]

    def _best(self, indices: range) -> Sequence[int]:
        """Return the ``n`` with the highest log-probability per token, the best first."""
        if self._n == self._best_of:
            return indices
        return sorted(indices, key=self._mean_logprob, reverse=True)[: self._n]

    def _mean_logprob(self, index: int) -> float:
        logprobs = [entry.logprob for entry in self._logprobs[index]]
        return statistics.fmean(logprobs) if logprobs else LEAST_LOGPROB

    def _choice(self, index: int) -> Choice:
        choice, reason = super()._choice(index), self._ends[index].finish_reason
        whole = RequestOutput(
            0,
            choice.text,
            self._token_ids[index],
            reason,
            logprobs=self._logprobs[index],
            prompt_logprobs=self._scored.get(index),
        )
        story = Story(self._details, self._details.prompts[index // self._best_of])
        choice.details = story.take(whole)
        if reason is not None:
            choice.finish_reason = story.reason(reason)
        if choice.details is not None:
            choice.text = choice.details.text
        return choice
