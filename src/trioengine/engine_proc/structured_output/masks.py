"""Which tokens the grammars of a step's rows allow: one mask a row, filled beside the step.

Theory of operation
-------------------
Logits are there at the end of a step, and masks are not needed before that. So ``fill`` only says
what is to be filled and by which rows; threads of its own fill while the step computes, and the
runner waits for them before it looks at logits. The library lets go of the GIL for each mask. Its
own pool is not used: its threads spin for a while when they have nothing to do, which took more
time from the step than all masks of a schema.

A matcher belongs to one thread at a time. ``settle`` returns when the threads have left them all,
and comes before anybody tells a grammar what was sampled.
"""

from __future__ import annotations

import concurrent.futures
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from trioengine.engine_proc.machine import usable_cpus
from trioengine.engine_proc.runner import AllowMasks

if TYPE_CHECKING:
    import numpy.typing as npt

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.runner import SamplingRows
    from trioengine.engine_proc.structured_output.grammar import GrammarState

    Words = npt.NDArray[np.uint32]

__all__ = ["MaskFiller"]

_CPUS_PER_THREAD: Final = 4  # the others compute the step
_LINE_WORDS: Final = 16  # of a cache line

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    state: GrammarState
    place: int  # its row of the words
    within: int  # the place of what its request allows in any case, -1 for everything


class MaskFiller:
    """Fills masks of one width: ``ceil(vocab_size / 32)`` words. One step at a time."""

    def __init__(self, vocab_size: int) -> None:
        """Start no thread yet."""
        self._width = -(-vocab_size // 32)
        self._num_threads = max(1, usable_cpus() // _CPUS_PER_THREAD)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._words: Words = np.zeros((0, _row_words(self._width)), np.uint32)
        self._filling: list[concurrent.futures.Future[None]] = []

    def fill(self, requests: list[Request], rows: SamplingRows) -> None:
        """Begin to give the rows of requests with a grammar masks, within those they have already.

        ``rows.allow`` is complete when its ``wait`` returns. A grammar that raises leaves a mask
        that allows nothing: its request ends with the error. The masks last until the next call.

        Args:
            requests: Whose the first rows are.
            rows: Of the step.
        """
        masked = [row for row, request in enumerate(requests) if request.grammar is not None]
        if not masked:
            return
        before = rows.allow
        first = 0 if before is None else len(before.words)
        words = self._room(first + len(masked))
        row_masks = np.full(len(rows.temperature), -1, np.int32)
        if before is not None:
            words[:first] = before.words
            row_masks[: len(before.row_masks)] = before.row_masks
        withins = row_masks[masked].tolist()
        row_masks[masked] = np.arange(first, first + len(masked), dtype=np.int32)
        jobs = [
            _Job(state, place, within)
            for place, (row, within) in enumerate(zip(masked, withins, strict=True), first)
            if (state := requests[row].grammar) is not None
        ]
        self._begin(jobs, words)
        rows.allow = AllowMasks(words, row_masks, self._filling)

    def settle(self) -> None:
        """Wait until nobody fills a mask any more."""
        for part in self._filling:
            part.result()
        self._filling = []

    def close(self) -> None:
        """Let the threads go. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _room(self, count: int) -> Words:
        if len(self._words) < count:
            self._words = np.zeros((count, self._words.shape[1]), np.uint32)
        return self._words[:count, : self._width]

    def _begin(self, jobs: list[_Job], words: Words) -> None:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self._num_threads, "masks")
        parts = min(self._num_threads, len(jobs))
        self._filling = [
            self._threads.submit(_fill, jobs[part::parts], words) for part in range(parts)
        ]


def _row_words(width: int) -> int:
    """Return how far apart rows lie: the head reads all of them side by side.

    At an even number of cache lines they would share few sets of the L1 cache.
    """
    lines = -(-width // _LINE_WORDS)
    return (lines | 1) * _LINE_WORDS


def _fill(jobs: list[_Job], words: Words) -> None:
    begin, row_bytes, num_bytes = words.ctypes.data, words.strides[0], words.shape[1] * 4
    for state, place, within in jobs:
        try:
            state.matcher.unsafe_compute_mask_ptr(begin + place * row_bytes, num_bytes)
        except Exception:  # contained: the culprit is left without a token
            log.exception("filling a mask failed")
            words[place] = 0
        if within >= 0:
            words[place] &= words[within]
