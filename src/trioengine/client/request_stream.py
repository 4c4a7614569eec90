"""The consumer's end of one HTTP request: all its sequences, merged deltas, one way to end it.

Theory of operation
-------------------
A request is one or more *sequences* (prompts times n), each with a cell that holds at most one
delta. While the consumer is behind, deltas merge in the cell, so the reader task never waits and
memory never grows by more than the text itself. Nor by that without bound, where each token carries
the logprobs of others: the table ends a stream that is ``too_far_behind``. What has arrived is
handed out before what went wrong; a stream raises its error, a fresh copy each time, until its
owner closes it.

``close`` is synchronous and idempotent: no checkpoint, hence nothing that could interrupt it, hence
no shield. It may be called by anybody: by the owner, who will not receive any more, or by a
deadline or a drain, and then the owner's ``receive`` raises what fits the reason.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final, Protocol, Self

import trio

from trioengine.client.sequence import Sequence, SequenceState
from trioengine.closing import ClosedOnExit
from trioengine.errors import (
    CancelledByUserError,
    DeadlineExceededError,
    QueueTimeoutError,
    TrioEngineError,
    UnavailableError,
)

if TYPE_CHECKING:
    from trioengine.client.sequence import SequenceRequest
    from trioengine.client.timers import Timer
    from trioengine.metrics import AbortReason
    from trioengine.outputs import RequestOutput

__all__ = ["MAX_PENDING", "RequestStream", "StreamOwner", "error_for"]

MAX_PENDING: Final = 2**16  # tokens, reported alternatives included: a few megabytes a request


class StreamOwner(Protocol):
    """Who a stream turns to; the engine client."""

    def close_stream(self, stream: RequestStream, reason: AbortReason) -> None:
        """Abort what the stream still has in queue or engine."""

    def forget_stream(self, stream: RequestStream) -> None:
        """Take note that everything has been handed out."""


class RequestStream(ClosedOnExit):
    """What the engine says about one HTTP request. Use as a synchronous context manager.

    Made by ``EngineClient.open_stream``. One task may wait on it at a time.

    Attributes:
        sequences: In the order they were asked for.
        arrived_s: When the request arrived; latencies count from here.
        opened_s: When it was queued last.
        first_token_s: When the first token of any sequence arrived, else ``None``.
        aborted_s: When it was closed while something was still owed, else ``None``.
        error: What ``receive`` raises once it has handed out what came before.
        num_live: Sequences whose end is not known yet.
        num_queued: Sequences in the server's queue.
        num_replays: How often another engine may be asked, where one dies.
        ended: Set when ``num_live`` is 0: the engine holds nothing of this request any more.
        timers: To be cancelled when it ends.
    """

    def __init__(
        self,
        owner: StreamOwner,
        requests: list[SequenceRequest],
        *,
        first_id: int,
        key: str,
        priority: int,
        arrived_s: float,
        opened_s: float,
        num_replays: int = 0,
    ) -> None:
        """Number the sequences from ``first_id`` on, all QUEUED."""
        self.sequences = tuple(
            Sequence(self, index, first_id + index, request, priority, key)
            for index, request in enumerate(requests)
        )
        self.arrived_s = arrived_s
        self.opened_s = opened_s
        self.first_token_s: float | None = None
        self.aborted_s: float | None = None
        self.error: TrioEngineError | None = None
        self.num_live = self.num_queued = len(self.sequences)
        self.ended = trio.Event()
        self.timers: list[Timer] = []
        self.num_replays = num_replays
        self._owner = owner
        self._closed = False
        self._handed_out = False
        self._num_unaccepted = self._num_owed = self._num_unfinished = len(self.sequences)
        self._gathers = False
        self._full: list[Sequence] = []  # those with something in their cell
        self._num_merged = 0  # tokens and alternatives in the cells beyond their first delta
        self._waiter: trio.lowlevel.Task | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{s.request_id} {s.state.name}" for s in self.sequences)
        return f"<RequestStream {states}>"

    # The consumer ---------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once every sequence's terminal has been handed out."""
        return self._num_owed == 0

    async def wait_accepted(self) -> None:
        """Wait until the engine has every sequence in its own queue, or has ended it.

        Raises:
            TrioEngineError: The request failed; which one says how (see ``receive``).
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._num_unaccepted and self.error is None:
            await self._wait()
        if self.error is not None:
            raise copy.copy(self.error)

    async def receive(self) -> list[tuple[int, RequestOutput]]:
        """Return what is new: (index, delta), at most one for each sequence; at least one.

        Waits only where nothing has arrived. Cancelling it loses nothing.

        Raises:
            InternalError: The engine ended a sequence with an error; the others are aborted.
            EngineDeadError: The engine died.
            DeadlineExceededError: The total deadline passed.
            QueueTimeoutError: It waited too long for a place in the engine.
            CancelledByUserError: It was cancelled, or its client has left.
            UnavailableError: The server is shutting down.
            trio.EndOfChannel: ``finished`` already.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._full:
            if self.error is not None:
                raise copy.copy(self.error)
            if self.finished:
                raise trio.EndOfChannel
            await self._wait()
        return self._take()

    async def receive_whole(self) -> list[tuple[int, RequestOutput]]:
        """Return everything, merged: (index, all of it) for each sequence, once all have ended.

        For consumers that can show nothing before: until then the request can be replayed.

        Raises:
            TrioEngineError: As of ``receive``; what has arrived before is kept from its consumer.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._gathers = True
        while self._num_unfinished and self.error is None:
            await self._wait()
        if self._full and not self._num_unfinished:
            return self._take()
        raise trio.EndOfChannel if self.error is None else copy.copy(self.error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        if self.finished:
            raise StopAsyncIteration
        return await self.receive()

    def close(self, reason: AbortReason = "client_disconnect") -> None:
        """End the request: abort what is unfinished, forget what was not taken.

        Synchronous and idempotent. The abort has left when this returns; ``ended`` is set when the
        engine has confirmed.
        """
        if not self._closed:
            self._closed = True
            self._owner.close_stream(self, reason)

    # The reader, through the stream table ---------------------------------------------------

    def accept(self, sequence: Sequence) -> None:
        """Note that the engine knows this sequence. Idempotent."""
        if not sequence.accepted:
            sequence.accepted = True
            self._num_unaccepted -= 1
            if not self._num_unaccepted:
                self._wake()

    def put(self, sequence: Sequence, delta: RequestOutput) -> bool:
        """Put a delta into its cell; True if it was merged with one that waits there."""
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._wake()
        if sequence.cell is not None:
            sequence.cell.merge(delta)
            if self._gathers:
                return False
            self._num_merged += len(delta.token_ids)
            if delta.logprobs is not None:
                self._num_merged += sum(len(told.top) for told in delta.logprobs)
            return True
        sequence.cell = delta
        self._full.append(sequence)
        self._wake()
        return False

    @property
    def too_far_behind(self) -> bool:
        """True where more has gathered than any consumer may leave lying."""
        return self._num_merged > MAX_PENDING

    def fail(self, error: TrioEngineError) -> None:
        """Raise ``error`` from now on, after what has arrived; the first error stays."""
        if self.error is None:
            self.error = error
            self._wake()

    @property
    def replayable(self) -> bool:
        """True where it may be asked of another engine: nobody has seen any of its answer."""
        return self.num_replays > 0 and not self._handed_out and self.error is None

    def begin_again(self, sequences: list[Sequence]) -> None:
        """Forget what came of these; another engine is to answer."""
        self.num_replays -= 1
        self.num_queued += len(sequences)
        for sequence in sequences:
            sequence.cell = sequence.last_token_s = None
        self._full = [sequence for sequence in self._full if sequence.cell is not None]
        self._num_merged = 0

    def discard(self) -> None:
        """Forget what was not taken."""
        for sequence in self._full:
            sequence.cell = None
        self._full = []
        self._num_merged = 0

    def disarm(self) -> None:
        """Cancel its timers."""
        for timer in self.timers:
            timer.cancel()
        self.timers = []

    # In between -----------------------------------------------------------------------------

    def _take(self) -> list[tuple[int, RequestOutput]]:
        if not self._handed_out:
            self._handed_out = True
            for sequence in self.sequences:  # it will not be sent again
                if sequence.state is not SequenceState.QUEUED:
                    sequence.request = None
        full, self._full = self._full, []
        self._num_merged = 0
        deltas = []
        for sequence in full:
            delta, sequence.cell = sequence.cell, None
            if delta is None:
                continue
            self._num_owed -= delta.finish_reason is not None
            deltas.append((sequence.index, delta))
        if self.finished:
            self._owner.forget_stream(self)
        return deltas

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)

    async def _wait(self) -> None:
        # An Event for each delta would cost as much as all else that is done for it.
        if self._waiter is not None:
            raise trio.BusyResourceError("another task waits on this stream")
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)

    def _stop_waiting(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED


def error_for(reason: AbortReason) -> TrioEngineError:
    """Return what the consumer of a request gets that was closed under its hands."""
    if reason == "deadline":
        return DeadlineExceededError("the request's deadline has passed")
    if reason == "queue_timeout":
        return QueueTimeoutError("the request waited too long for a place in the engine")
    if reason == "shutdown":
        return UnavailableError("the server is shutting down", code="draining")
    if reason == "cancelled":
        return CancelledByUserError("the request was cancelled")
    return CancelledByUserError(f"the request was closed: {reason}")
