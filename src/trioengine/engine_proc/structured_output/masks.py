"""Which tokens the grammars of a step's rows allow: one mask a row, filled by several threads."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import numpy as np

from trioengine.engine_proc.runner import AllowMasks

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor

    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.runner import SamplingRows
    from trioengine.engine_proc.structured_output.grammar import GrammarState

__all__ = ["MaskFiller"]

log = logging.getLogger(__name__)


class MaskFiller:
    """Fills masks of one width: ``ceil(vocab_size / 32)`` words."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // 32)

    def fill(self, requests: list[Request], rows: SamplingRows) -> None:
        """Give the rows of requests with a grammar their masks, within those they have already.

        A grammar that fails leaves a mask that allows nothing: its request ends with the error.

        Args:
            requests: Whose the first rows are.
            rows: Of the step.
        """
        states = [
            (row, request.grammar)
            for row, request in enumerate(requests)
            if request.grammar is not None
        ]
        if not states:
            return
        words = np.zeros((len(states), self._width), np.uint32)
        self._compute([state for _, state in states], words)
        rows.allow = _joined(rows, [row for row, _ in states], words)

    def _compute(self, states: list[GrammarState], words: npt.NDArray[np.uint32]) -> None:
        jobs = [(state.matcher, index) for index, state in enumerate(states)]
        try:
            self._executor.unsafe_compute_mask_ptr(
                jobs, words.ctypes.data, self._width * 4, len(states)
            )
        except Exception:  # contained: one by one, the culprit is left without a mask
            log.exception("filling masks together failed")
            for state, row in zip(states, words, strict=True):
                _compute_alone(state, row)

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()


def _compute_alone(state: GrammarState, row: npt.NDArray[np.uint32]) -> None:
    try:
        state.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    except Exception:
        log.exception("filling a mask failed")
        row[:] = 0


def _joined(rows: SamplingRows, masked: list[int], words: npt.NDArray[np.uint32]) -> AllowMasks:
    before = rows.allow
    row_masks = np.full(len(rows.temperature), -1, np.int32)
    if before is None:
        row_masks[masked] = np.arange(len(masked), dtype=np.int32)
        return AllowMasks(words, row_masks)
    row_masks[: len(before.row_masks)] = before.row_masks
    for index, row in enumerate(masked):
        if row_masks[row] >= 0:
            words[index] &= before.words[row_masks[row]]
    first = len(before.words)
    row_masks[masked] = np.arange(first, first + len(masked), dtype=np.int32)
    return AllowMasks(np.concatenate([before.words, words]), row_masks)
