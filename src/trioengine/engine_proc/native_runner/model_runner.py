"""The runner that the scheduler sees: numpy arrays in, token ids out, one C++ call per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioengine.engine_proc.native_runner import _native
from trioengine.engine_proc.runner import RowLogprobs, StepResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trioengine.engine_proc.runner import AllowMasks, LogitBias, Penalties, StepBatch
    from trioengine.protocol import ModelInfo

__all__ = ["NativeModelRunner"]


class NativeModelRunner:
    """Fulfils ``ModelRunner``: bitwise the same answer for a request, whatever shares its steps.

    Within one instruction set, the logits of a token depend on the tokens before it and on nothing
    else: not on the batch, the number of threads, how a prompt was cut into chunks, or whether its
    first blocks came from the prefix cache.

    Args:
        runner: Owns weights and cache.
        model: What to say about the model.
        block_size: Tokens per block.
        num_blocks: Blocks of the cache.
    """

    def __init__(
        self, runner: _native.Runner, model: ModelInfo, *, block_size: int, num_blocks: int
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._runner: _native.Runner | None = runner

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute one step; see ``ModelRunner``.

        Raises:
            ValueError: The batch is not sound (an index out of range, a wrong dtype or shape);
                nothing was changed.
            RuntimeError: The runner is closed, or another thread is in a step.
        """
        result, _ = self._call(batch, want_logits=False)
        return result

    def logits(self, batch: StepBatch) -> tuple[StepResult, npt.NDArray[np.float32]]:
        """Compute one step; return its result and the logits, float32 ``[num_rows, vocab]``.

        The logits are the model's own, before masks, biases and penalties. Raises as ``execute``
        does.
        """
        result, logits = self._call(batch, want_logits=True)
        if logits is None:  # never: they were asked for
            raise RuntimeError("the extension returned no logits")
        return result, logits

    def _call(
        self, batch: StepBatch, *, want_logits: bool
    ) -> tuple[StepResult, npt.NDArray[np.float32] | None]:
        if self._runner is None:
            raise RuntimeError("the runner is closed")
        rows = batch.sampling
        tokens, logprobs, logits = self._runner.execute(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.logits_rows,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            rows.min_p,
            rows.seeds,
            rows.positions,
            rows.masked_token_ids,
            None if rows.allow is None else (rows.allow.words, rows.allow.row_masks),
            _latch(rows.allow),
            _fields(rows.bias),
            _fields(rows.penalties),
            rows.logprobs_k,
            rows.targets,
            want_logits,
        )
        return StepResult(tokens, None if logprobs is None else RowLogprobs(*logprobs)), logits

    def call(self, method: str, args: dict[str, object]) -> object:
        """Refuse: there is no control method that concerns the arithmetic.

        Raises:
            KeyError: Always.
        """
        raise KeyError(method)

    def close(self) -> None:
        """Free weights and cache. Idempotent; nothing may be computed afterwards."""
        self._runner = None


def _fields(
    arrays: LogitBias | Penalties | None,
) -> tuple[npt.NDArray[Any], ...] | None:
    """Return the arrays in the order of their fields, which is that of the extension."""
    if arrays is None:
        return None
    return tuple(getattr(arrays, name) for name in arrays.__slots__)


def _latch(allow: AllowMasks | None) -> _native.Latch | None:
    """Return what opens when the masks are filled: the step waits for it before its head."""
    if allow is None or not allow.filling:
        return None
    latch = _native.Latch(len(allow.filling))
    for part in allow.filling:
        part.add_done_callback(lambda _: latch.count_down())
    return latch
