"""The engine of an embedding model: sequences wait, a batch of them is computed, each ends.

There is no cache, no sampling and no second step: a sequence is there until the batch that it is in
has been computed. An abort that arrives meanwhile wins, as in the engine that generates.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Protocol

from trioengine.errors import InvalidRequestError, ProtocolError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import EngineLimits, EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from trioengine.protocol import Add, ModelInfo

__all__ = ["EmbeddingCore", "EmbeddingRunner"]


class EmbeddingRunner(Protocol):
    """Computes embeddings."""

    model: ModelInfo

    def embed(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return one embedding for each sequence of token ids, float32 ``[n, size]``."""

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method. Raises ``KeyError`` for one it does not know."""

    def close(self) -> None:
        """Free the weights."""


class EmbeddingCore:
    """Fulfils ``EngineBackend`` over an ``EmbeddingRunner``.

    Attributes:
        model: The runner's.
        limits: How much it holds at once; there are no blocks.
    """

    def __init__(
        self, runner: EmbeddingRunner, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        """Take over a loaded runner.

        Args:
            runner: Closed by ``shutdown``.
            max_num_seqs: Most sequences a step.
            max_num_batched_tokens: Most tokens a step, padding included; one sequence always fits.
        """
        self.model = runner.model
        self.limits = EngineLimits(max_num_seqs, max_num_batched_tokens, 0, 0)
        self._runner = runner
        self._waiting: collections.OrderedDict[int, Add] = collections.OrderedDict()
        self._running: dict[int, Add] = {}
        self._prompt_tokens = self._aborts_ignored = 0
        self._at_once = max_num_seqs  # fewer for some time after a shortage of memory
        self._step_seconds = 0.0

    def add_request(self, add: Add) -> RequestOutput | None:
        """Take a sequence into waiting, or return its terminal error.

        Raises:
            ProtocolError: The id is live already: the server has lost count.
        """
        if add.request_id in self._waiting or add.request_id in self._running:
            raise ProtocolError(f"request id {add.request_id} was added twice")
        ids, model = add.prompt_token_ids, self.model
        if not 1 <= len(ids) <= model.max_model_len:
            error = f"an input must have 1 to {model.max_model_len} tokens, got {len(ids)}"
            return _error(add.request_id, error)
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            return _error(add.request_id, f"token ids must be in [0, {model.vocab_size})")
        self._waiting[add.request_id] = add
        return None

    def settle(self) -> tuple[list[int], list[RequestOutput]]:
        """Return nothing: every request is taken or refused at once."""
        return [], []

    def has_news(self) -> bool:
        """False: see ``settle``."""
        return False

    def when_settled(self, wake: Callable[[], None]) -> None:
        """Never call it."""

    def abort(self, request_ids: Sequence[int]) -> list[RequestOutput]:
        """Forget these sequences; return one terminal per live id."""
        outputs = []
        for request_id in request_ids:
            taken = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
            if taken is None:
                self._aborts_ignored += 1
            else:
                outputs.append(RequestOutput(request_id, finish_reason=FinishReason.ABORT))
        return outputs

    @property
    def live_ids(self) -> frozenset[int]:
        """Ids of the sequences that have not had their terminal."""
        return frozenset([*self._waiting, *self._running])

    def has_work(self) -> bool:
        """True while a sequence waits."""
        return bool(self._waiting)

    def step(self, poll_aborts: Callable[[], Sequence[int]]) -> list[RequestOutput]:
        """Compute one batch, poll aborts, end what is still there.

        Raises:
            Exception: Whatever the runner raises.
        """
        begin_s = time.perf_counter()
        self._running = self._take_batch()
        batch = list(self._running.values())
        try:
            vectors = self._runner.embed([add.prompt_token_ids for add in batch])
        except MemoryError as error:
            return [*self.abort(poll_aborts()), *self._retrench(error)]
        self._at_once = min(self._at_once + 1, self.limits.max_num_seqs)
        outputs = self.abort(poll_aborts())
        for add, vector in zip(batch, vectors, strict=True):
            if self._running.pop(add.request_id, None) is None:
                continue  # aborted meanwhile
            self._prompt_tokens += len(add.prompt_token_ids)
            outputs.append(
                RequestOutput(
                    add.request_id,
                    finish_reason=FinishReason.STOP,
                    embedding=vector.astype("<f4").tobytes(),
                )
            )
        self._step_seconds = time.perf_counter() - begin_s
        return outputs

    def _retrench(self, shortage: MemoryError) -> list[RequestOutput]:
        """There was no memory for the batch: try half of it, or end the one that is in it."""
        taken, self._running = self._running, {}
        if len(taken) <= 1:
            return [_error(request_id, str(shortage) or "MemoryError") for request_id in taken]
        self._at_once = len(taken) // 2
        for request_id in reversed(taken):
            self._waiting[request_id] = taken[request_id]
            self._waiting.move_to_end(request_id, last=False)
        return []

    def _take_batch(self) -> dict[int, Add]:
        """Take who comes next, by priority and then arrival, as far as the token budget goes."""
        queue = sorted(self._waiting.values(), key=lambda add: add.priority)
        taken: dict[int, Add] = {}
        longest = 0
        for add in queue[: self._at_once]:
            longest = max(longest, len(add.prompt_token_ids))
            padded = longest * (len(taken) + 1)
            if taken and padded > self.limits.max_num_batched_tokens:
                break
            taken[add.request_id] = self._waiting.pop(add.request_id)
        return taken

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            prompt_tokens=self._prompt_tokens,
            aborts_ignored=self._aborts_ignored,
            step_seconds=self._step_seconds,
        )

    def call(self, method: str, args: dict[str, object]) -> object:
        """Run a control method.

        Raises:
            InvalidRequestError: Nobody knows it.
        """
        if method == "check_integrity":
            return None
        try:
            return self._runner.call(method, args)
        except KeyError as error:
            raise InvalidRequestError(f"unknown method {method!r}") from error

    def shutdown(self) -> None:
        """Free the runner's weights."""
        self._runner.close()


def _error(request_id: int, message: str) -> RequestOutput:
    return RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=message)
