"""Every sequence whose end is not known yet: what arrives for it, and what ends it. No I/O.

Theory of operation
-------------------
A sequence is in the table from ``register`` to its end: the engine's terminal, its withdrawal from
the queue, or the engine's death. An aborted one stays until the engine has confirmed, because until
then it holds blocks and a place there. Functions that lead to aborts return the ids; sending them
is the caller's business. Ids are never used twice, so what comes for an id that is not in the table
is late news of nobody, counted and dropped, never an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trioengine.client.request_queue import RequestQueue
from trioengine.client.request_stream import error_for
from trioengine.client.sequence import SequenceEvent, SequenceState
from trioengine.errors import InternalError, InvalidRequestError, TrioEngineError
from trioengine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioengine.client.request_stream import RequestStream
    from trioengine.client.sequence import Sequence
    from trioengine.metrics import AbortReason, Metrics
    from trioengine.outputs import RequestOutput

__all__ = ["StreamTable"]

logger = logging.getLogger(__name__)


class StreamTable:
    """The table.

    Attributes:
        num_sent: Sequences that the engine holds, or will when it has read its mail.
        streams: Streams that are not closed, not failed, and have something to hand out still.
    """

    def __init__(self, metrics: Metrics, queue: RequestQueue | None = None) -> None:
        self.num_sent = 0
        self.streams: dict[RequestStream, None] = {}  # in order of arrival
        self._metrics = metrics
        self._live: dict[int, Sequence] = {}
        self._queue = RequestQueue() if queue is None else queue

    def __len__(self) -> int:
        """Sequences whose end is not known, queued ones included."""
        return len(self._live)

    @property
    def idle(self) -> bool:
        """True where nobody is owed anything, by us or by the engine."""
        return not self._live and not self.streams

    # In -------------------------------------------------------------------------------------

    def register(self, stream: RequestStream) -> None:
        """Queue every sequence of a new stream."""
        self.streams[stream] = None
        for sequence in stream.sequences:
            self._live[sequence.request_id] = sequence
            self._queue.push(sequence)

    def take_next(self, now_s: float) -> Sequence | None:
        """Take the next sequence out of the queue, as OPEN; ``None`` if none waits."""
        sequence = self._queue.pop()
        if sequence is None:
            return None
        sequence.advance(SequenceEvent.SEND)
        self.num_sent += 1
        stream = sequence.stream
        stream.num_queued -= 1
        self._metrics.queue_time.observe(now_s - stream.opened_s)
        return sequence

    # News from the engine -------------------------------------------------------------------

    def accept(self, request_ids: Iterable[int]) -> None:
        """Note that the engine has these in its own queue."""
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None:
                sequence.stream.accept(sequence)

    def deliver(self, deltas: Iterable[RequestOutput], now_s: float) -> list[int]:
        """Hand each delta to its stream, which merges it; never waits.

        Returns:
            Ids to abort: the siblings of a sequence that ended with an error, and the sequences of
            a stream whose consumer is too far behind.
        """
        to_abort: list[int] = []
        for delta in deltas:
            sequence = self._live.get(delta.request_id)
            if sequence is None:
                self._metrics.deltas_dropped.inc("unknown")
            elif delta.finish_reason is None:
                # OPEN stays OPEN: the move that is made most is not looked up.
                if sequence.state is SequenceState.OPEN:
                    self._hand_over(sequence, delta, now_s)
                    if sequence.stream.too_far_behind:
                        to_abort += self.close(sequence.stream, "slow_client", now_s)
                else:
                    sequence.advance(SequenceEvent.DELTA)
                    self._metrics.deltas_dropped.inc("aborted")
            else:
                to_abort += self._deliver_terminal(sequence, delta, now_s)
        return to_abort

    def _deliver_terminal(
        self, sequence: Sequence, delta: RequestOutput, now_s: float
    ) -> list[int]:
        left = sequence.advance(SequenceEvent.TERMINAL)
        self.num_sent -= 1
        to_abort: list[int] = []
        stream = sequence.stream
        if left is SequenceState.OPEN:
            error = _error_of(delta)
            if error is None:
                self._hand_over(sequence, delta, now_s)
            elif stream.error is None:
                self._give_up(stream, error)
                to_abort = self._abort(stream, now_s)
        self._end(sequence, now_s)
        return to_abort

    def _hand_over(self, sequence: Sequence, delta: RequestOutput, now_s: float) -> None:
        stream, metrics = sequence.stream, self._metrics
        if not sequence.accepted:
            stream.accept(sequence)
        if delta.token_ids:
            if sequence.last_token_s is not None:
                metrics.inter_token_latency.observe(now_s - sequence.last_token_s)
            elif stream.first_token_s is None:
                stream.first_token_s = now_s
                metrics.time_to_first_token.observe(now_s - stream.arrived_s)
            sequence.last_token_s = now_s
        if stream.put(sequence, delta):
            metrics.deltas_merged.inc()

    # Out ------------------------------------------------------------------------------------

    def close(self, stream: RequestStream, reason: AbortReason, now_s: float) -> list[int]:
        """End a stream for good. Return the ids that the engine must be told to abort.

        It counts as aborted where something was still owed and nothing had failed before.
        """
        stream.discard()
        self.forget(stream)
        if stream.num_live and stream.error is None:
            stream.aborted_s = now_s
            self._metrics.requests_aborted.inc(reason)
        stream.disarm()
        stream.fail(error_for(reason))
        return self._abort(stream, now_s)

    def forget(self, stream: RequestStream) -> None:
        """Owe this stream's consumer nothing any more. Idempotent."""
        self.streams.pop(stream, None)

    def fail_all(self, error: TrioEngineError) -> None:
        """End everything that is not finished: there is no engine, and none will come."""
        self.num_sent = 0
        for stream in dict.fromkeys(sequence.stream for sequence in self._live.values()):
            self._fail(stream, error)

    def lose_engine(self, error: TrioEngineError) -> list[RequestStream]:
        """End what the engine held, or queue it again where that may be; keep what is queued.

        Returns:
            The streams that were queued again.
        """
        self.num_sent = 0
        held: dict[RequestStream, list[Sequence]] = {}
        for sequence in self._live.values():
            if sequence.state is not SequenceState.QUEUED:
                held.setdefault(sequence.stream, []).append(sequence)
        returned = {stream: sequences for stream, sequences in held.items() if stream.replayable}
        for stream in held:
            if stream not in returned:
                self._fail(stream, error)
        # The last first: each goes before all that wait.
        for stream, sequences in reversed(returned.items()):
            stream.begin_again(sequences)
            for sequence in reversed(sequences):
                sequence.advance(SequenceEvent.RETURN)
                self._queue.give_back(sequence)
        return list(returned)

    def _fail(self, stream: RequestStream, error: TrioEngineError) -> None:
        """End every sequence of a stream that the engine has died with."""
        for sequence in stream.sequences:
            if self._live.pop(sequence.request_id, None) is None:
                continue
            if sequence.advance(SequenceEvent.ENGINE_DEAD) is SequenceState.QUEUED:
                self._queue.remove(sequence)
            sequence.request = None
        stream.num_live = stream.num_queued = 0
        if stream.aborted_s is not None:
            self._metrics.aborts_unconfirmed.inc()
        self._give_up(stream, error)
        stream.ended.set()

    def _give_up(self, stream: RequestStream, error: TrioEngineError) -> None:
        self.forget(stream)
        stream.disarm()
        stream.fail(error)

    def _abort(self, stream: RequestStream, now_s: float) -> list[int]:
        """Take a stream's sequences out of the queue; return those that the engine has."""
        to_abort = []
        for sequence in stream.sequences:
            left = sequence.advance(SequenceEvent.CLOSE)
            if left is SequenceState.OPEN:
                to_abort.append(sequence.request_id)
            elif left is SequenceState.QUEUED:
                self._queue.remove(sequence)
                stream.num_queued -= 1
                self._end(sequence, now_s)
        return to_abort

    def _end(self, sequence: Sequence, now_s: float) -> None:
        del self._live[sequence.request_id]
        sequence.request = None
        stream = sequence.stream
        stream.num_live -= 1
        if stream.num_live:
            return
        stream.disarm()
        stream.ended.set()
        if stream.aborted_s is not None:
            taken_s = now_s - stream.aborted_s
            self._metrics.abort_latency.observe(taken_s)
            logger.debug("abort confirmed after %.3f ms", taken_s * 1000)
        elif stream.error is None:
            self._metrics.request_latency.observe(now_s - stream.arrived_s)


def _error_of(delta: RequestOutput) -> TrioEngineError | None:
    """Return what is wrong with a terminal that nobody asked for by an abort."""
    if delta.finish_reason is FinishReason.ERROR:
        if delta.refused and delta.error:
            return InvalidRequestError(delta.error, param=delta.param)
        return InternalError(delta.error or "the engine failed this request")
    if delta.finish_reason is FinishReason.ABORT:
        return InternalError("the engine aborted this request unasked")
    return None
