"""Deltas of all sequences of one request → events, or one whole answer, and the token counts. Pure.

Deltas may arrive in any grouping, several tokens merged into one: what is told joins to the same
text whatever the grouping was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioengine.errors import InternalError
from trioengine.http.replies import Choice
from trioengine.outputs import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioengine.errors import TrioEngineError
    from trioengine.http.convert import Job
    from trioengine.http.replies import Replies
    from trioengine.outputs import RequestOutput

__all__ = ["Collection", "Deltas", "Narration", "Tally"]

# (index, delta): index as in `Job.sequences`.
Deltas = list[tuple[int, "RequestOutput"]]


class Tally:
    """Counts tokens. A prompt counts once, though each of its sequences reports on it."""

    def __init__(self, job: Job) -> None:
        self._per_prompt = job.best_of
        self._prompt_tokens = job.prompt_tokens
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def count(self, index: int, delta: RequestOutput) -> None:
        """Count one delta."""
        self._completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens and index % self._per_prompt == 0:
            self._cached[index] = max(delta.num_cached_tokens, self._cached.get(index, 0))

    @property
    def usage(self) -> Usage:
        """Everything counted so far."""
        return Usage(self._prompt_tokens, self._completion_tokens, sum(self._cached.values()))


class _Choices:
    """Knows which choices have ended, so that no answer is passed off as whole that is not."""

    def __init__(self, job: Job) -> None:
        self.tally = Tally(job)
        self._unfinished = len(job.sequences)

    def _note(self, index: int, delta: RequestOutput) -> None:
        self.tally.count(index, delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1

    def _check_whole(self) -> None:
        if self._unfinished:
            raise InternalError(f"{self._unfinished} choices ended without a reason")


class Narration(_Choices):
    """Tells a request's progress in events."""

    def __init__(self, job: Job, replies: Replies) -> None:
        super().__init__(job)
        self._replies = replies
        self._include_usage = job.include_usage
        self._begun: set[int] = set()

    def tell(self, deltas: Deltas) -> bytes:
        """Return the events of these deltas, to be written at once; ``b""`` if there are none."""
        replies, events = self._replies, []
        for index, delta in deltas:
            self._note(index, delta)
            if index not in self._begun:
                self._begun.add(index)
                events.append(replies.opening(index))
            if delta.text:
                events.append(replies.text(index, delta.text))
            if delta.finish_reason is not None:
                events.append(replies.finish(index, delta.finish_reason, delta.stop_reason))
        return b"".join(events)

    def failure(self, error: TrioEngineError) -> bytes:
        """Return the event that ends a stream which failed."""
        return self._replies.failure(error)

    def closing(self) -> bytes:
        """Return what follows the last choice's finish.

        Raises:
            InternalError: A choice has not finished.
        """
        self._check_whole()
        return (
            self._replies.usage(self.tally.usage) if self._include_usage else b""
        ) + self._replies.done


class Collection(_Choices):
    """Gathers the whole answer."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._texts: list[list[str]] = [[] for _ in job.sequences]
        self._ends: dict[int, RequestOutput] = {}

    def add(self, deltas: Deltas) -> None:
        """Take these deltas in."""
        for index, delta in deltas:
            self._note(index, delta)
            if delta.text:
                self._texts[index].append(delta.text)
            if delta.finish_reason is not None:
                self._ends[index] = delta

    def choices(self) -> Sequence[Choice]:
        """Return the choices in the order of their index.

        Raises:
            InternalError: One has not finished.
        """
        self._check_whole()
        return [self._choice(index) for index in range(len(self._texts))]

    def _choice(self, index: int) -> Choice:
        end = self._ends[index]
        if end.finish_reason is None:
            raise InternalError(f"choice {index} ended without a reason")
        return Choice("".join(self._texts[index]), end.finish_reason, end.stop_reason)
