"""From a plan to tokens: fill the batch, have it computed, look at what came back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trioengine.engine_proc.deltas import ALIEN_TOKEN
from trioengine.engine_proc.runner import NO_TOKEN
from trioengine.engine_proc.structured_output.masks import MaskFiller

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trioengine.engine_proc.input_batch import BuiltStep, InputBatch
    from trioengine.engine_proc.profiling import StepTimeline
    from trioengine.engine_proc.runner import ModelRunner, StepResult
    from trioengine.engine_proc.scheduler import SchedulerOutput

__all__ = ["Executor"]


class Executor:
    """Computes the steps of a plan, one after the other.

    Args:
        runner: Does the arithmetic.
        batch: The rows of the running sequences; the tokens go from step to step through it.
        timeline: Told of every phase boundary.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch, timeline: StepTimeline) -> None:
        self._runner = runner
        self._batch = batch
        self._timeline = timeline
        self._masks = MaskFiller(runner.model.vocab_size)

    def run(
        self, parts: Sequence[SchedulerOutput]
    ) -> tuple[list[tuple[BuiltStep, StepResult]], MemoryError | None]:
        """Compute one step after the other, as many as there is memory for.

        Returns:
            Whose the rows of each step were and what they got; and what stopped it.

        Raises:
            Exception: Whatever the runner raises but ``MemoryError``.
        """
        executed: list[tuple[BuiltStep, StepResult]] = []
        for ahead, part in enumerate(parts):
            try:
                built, result = self._execute(part, ahead)
            except MemoryError as error:  # what it has put into the cache, it will put there again
                return executed, error
            self._batch.advance(part, built.sampled, result.tokens[: len(built.sampled)])
            executed.append((built, result))
        return executed, None

    def _execute(self, plan: SchedulerOutput, ahead: int) -> tuple[BuiltStep, StepResult]:
        built = self._batch.build(plan, ahead)
        self._masks.fill(built.sampled, built.batch.sampling)
        self._timeline.lap("build")
        try:
            result = self._runner.execute(built.batch)
        finally:
            self._masks.settle()
        result.tokens = self._checked(result.tokens)
        self._timeline.lap("execute")
        return built, result

    def close(self) -> None:
        """Let the threads go that fill masks. Idempotent."""
        self._masks.close()

    def _checked(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the sampled ids, with ``ALIEN_TOKEN`` for any that is not in the vocabulary."""
        vocab_size = self._runner.model.vocab_size
        ids = tokens.tolist()  # a list of a few is looked through faster than an array
        if max(ids, default=0) < vocab_size and min(ids, default=0) >= NO_TOKEN:
            return tokens
        known = (tokens.view(np.uint32) < vocab_size) | (tokens == NO_TOKEN)
        return np.where(known, tokens, np.int32(ALIEN_TOKEN))
