"""The server's view of the engine: open a stream, read what comes, survive its end.

Theory of operation
-------------------
The client lives as long as the server; engine *incarnations* (a process and its wire) are attached
with ``run_incarnation`` and detach when they end. Within one, a single reader task takes messages
off the wire and puts them where they belong, and never waits for a consumer.

``open_stream`` registers, charges and sends in one synchronous step, ``close`` aborts in one: there
is no checkpoint at which a cancelled task could leave half of it behind. An aborted sequence takes
its place in the engine until the engine has confirmed.

The end of an incarnation, seen by whichever sensor, is told in this order: the status is DEAD or
RESTARTING; the reader goes on until the wire is empty, so that what was on its way arrives; within
50 ms of the end of its process the cause is settled, and every stream that the engine had fails
with it. Where another is to come, what the engine had not heard of waits for that one, and so does,
once and if so asked for (``replay``), what nobody has seen an answer to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from trioengine.client.admission import Admission
from trioengine.client.control_calls import ControlCalls
from trioengine.client.engine_stats import StatsLedger
from trioengine.client.engine_status import EngineState, EngineStatus
from trioengine.client.nap import Nap
from trioengine.client.outlet import Outlet
from trioengine.client.request_queue import RequestQueue
from trioengine.client.request_stream import RequestStream
from trioengine.client.sequence import SequenceRequest
from trioengine.client.stream_table import StreamTable
from trioengine.client.timers import Timers
from trioengine.client.transport import Transport
from trioengine.errors import (
    DeadlineExceededError,
    EngineStartError,
    PeerGoneError,
    ProtocolError,
    TrioEngineError,
    UnavailableError,
)
from trioengine.metrics import Metrics
from trioengine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    CallResult,
    EngineLimits,
    Fatal,
    Hello,
    ModelInfo,
    Outputs,
    Progress,
    Ready,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

    from trioengine.client.admission import Slot
    from trioengine.client.restart_budget import RestartBudget
    from trioengine.metrics import AbortReason
    from trioengine.protocol import EngineMessage

__all__ = ["EngineClient", "RequestStream", "SequenceRequest", "Transport"]


class EngineClient:
    """The engine, whichever incarnation. Must be made within a Trio run.

    Attributes:
        status: State, reason, cause of death.
        nap: Orders to sleep and to wake up.
        admission: Places for requests.
        metrics: Everything that is counted.
        model: What is served, once an engine has been ready.
        limits: How much the engine holds, once one has been ready.
    """

    def __init__(
        self,
        *,
        max_queue_sequences: int = 1024,
        max_queue_time_s: float = 120.0,
        key_shares: Mapping[str, float] | None = None,
        restarts: RestartBudget | None = None,
        replay: bool = False,
        wakes_on_request: bool = False,
    ) -> None:
        """Begin without an engine.

        Args:
            key_shares: Weight of a key in the queue; 1 for those not named.
            max_queue_sequences: Most sequences at once, queued and running together.
            max_queue_time_s: Longest wait for a place in the engine; infinity for no bound.
            restarts: Says whether a dead engine is started again; without it, never.
            replay: Send once more, to the next engine, what nobody has seen an answer to.
            wakes_on_request: A request wakes an engine that sleeps, and waits for it.
        """
        self.status = EngineStatus(restarts, wakes_on_request=wakes_on_request)
        self.nap = Nap(self.status)
        self.admission = Admission(max_queue_sequences)
        self.metrics = Metrics()
        self.model: ModelInfo | None = None
        self.limits: EngineLimits | None = None
        self._max_queue_time_s = max_queue_time_s
        self._replay = replay
        self._table = StreamTable(self.metrics, RequestQueue(key_shares))
        self._stats = StatsLedger(self.metrics, lambda: len(self._table))
        self._timers = Timers()
        self._outlet = Outlet(self.status, self._table)
        self._next_id = 1
        self._calls = ControlCalls(self._outlet.send)
        self._idle = trio.lowlevel.ParkingLot()
        self.metrics.watch_state(lambda: self.status.state, EngineState)

    # Requests -------------------------------------------------------------------------------

    def open_stream(
        self,
        sequences: list[SequenceRequest],
        *,
        slot: Slot,
        key: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> RequestStream:
        """Queue a request, and send what the engine has room for. Synchronous: all or nothing.

        Args:
            sequences: At least one; their order is the index of what comes back.
            slot: The request's place, from ``admission.reserve()``; charged here unless it has been
                already. It stays the caller's to release.
            key: Whose share of the queue it takes; keys take turns.
            priority: Lower goes first among what waits of the same key.
            deadline_s: When the request is to be aborted in whatever phase,
                ``trio.current_time()``.

        Raises:
            UnavailableError: The engine takes no requests now; ``EngineDeadError`` if it is dead.
            OverloadedError: There is no place for so many sequences.
            DeadlineExceededError: The deadline has passed already.
        """
        if not sequences:
            raise ValueError("a request needs at least one sequence")
        self._refuse_unless_welcome(slot)
        now_s = trio.current_time()
        if deadline_s is not None and deadline_s <= now_s:
            raise DeadlineExceededError("the request's deadline has passed")
        slot.charge(len(sequences))
        stream = RequestStream(
            self,
            sequences,
            first_id=self._next_id,
            key=key,
            priority=priority,
            arrived_s=slot.arrived_s,
            opened_s=now_s,
            num_replays=int(self._replay),
        )
        self._next_id += len(sequences)
        self._table.register(stream)
        self.nap.want_awake()
        self._outlet.fill()
        if deadline_s is not None:
            stream.timers.append(self._timers.at(deadline_s, lambda: stream.close("deadline")))
        self._bound_wait(stream)
        return stream

    def _bound_wait(self, stream: RequestStream) -> None:
        """Close a stream that is queued now, if it still is when its time in the queue is over."""
        if stream.num_queued:
            opened_s = stream.opened_s
            end = self._timers.at(
                opened_s + self._max_queue_time_s, lambda: _end_wait(stream, opened_s)
            )
            stream.timers.append(end)

    def _refuse_unless_welcome(self, slot: Slot) -> None:
        status = self.status
        if status.state is EngineState.DRAINING and slot.arrived_s <= status.since_s:
            return  # it was admitted before the drain began
        if (refusal := status.refusal()) is not None:
            raise refusal

    def abort_all(self, reason: AbortReason) -> None:
        """Close every stream to which the engine still owes something."""
        for stream in list(self._table.streams):
            if stream.num_live:
                stream.close(reason)

    def fail_all(self, error: TrioEngineError) -> None:
        """Fail every open stream and call with ``error``: there is no engine to end them."""
        self._table.fail_all(error)
        self._calls.fail_all(error)
        self._note_idle()

    @property
    def idle(self) -> bool:
        """True where ``wait_idle`` does not wait."""
        return self._table.idle

    async def wait_idle(self) -> None:
        """Wait until no stream is open and the engine has confirmed every abort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._table.idle:
            await self._idle.park()

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Run a control method in the engine and return its result. The caller bounds the wait.

        Raises:
            UnavailableError: There is no engine to ask; ``EngineDeadError`` if it dies meanwhile.
            InternalError: The engine says that it could not.
        """
        if not self._outlet.room:
            code = self.status.state.value
            raise self.status.refusal() or UnavailableError("there is no engine now", code=code)
        return await self._calls.call(method, args)

    # For streams (StreamOwner) --------------------------------------------------------------

    def close_stream(self, stream: RequestStream, reason: AbortReason) -> None:
        """Abort what the stream still has in queue or engine, with at most one frame."""
        self._outlet.abort(self._table.close(stream, reason, trio.current_time()))
        self._note_idle()

    def forget_stream(self, stream: RequestStream) -> None:
        """Take note that everything has been handed out."""
        self._table.forget(stream)
        self._note_idle()

    @property
    def has_engine(self) -> bool:
        """True where an engine is attached that is ready, and has not been asked to leave."""
        return self._outlet.room > 0 and not self.status.engine_is_gone

    # An incarnation -------------------------------------------------------------------------

    async def keep_time(self) -> NoReturn:
        """End what is over time, until cancelled; an incarnation does so, too, while it lives."""
        await self._timers.run()

    async def run_incarnation(
        self,
        transport: Transport,
        *,
        task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Read from an engine until it ends, by death or because it was asked to (STOPPED).

        Reports ``started`` with the engine's ``Ready``. It does not mark the status READY: the
        caller knows what else must be ready. A death is in ``status``, not raised.

        Raises:
            EngineStartError: The engine ended before it was ready.
            ProtocolError: Another incarnation is attached.
        """
        self._outlet.attach(transport)
        death = self.status.death
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._timers.run)

                @nursery.start_soon
                async def end_when_settled() -> None:
                    await death.wait_settled()
                    nursery.cancel_scope.cancel(reason="the engine is dead")

                await self._read(transport, lambda ready: task_status.started(ready))
                if not death.seen.is_set():
                    nursery.cancel_scope.cancel(reason="the engine has left as asked")
            was_ready = self._outlet.room > 0
        finally:
            self._detach()
        if not was_ready:
            raise EngineStartError(self.status.reason)

    def _detach(self) -> None:
        self._outlet.detach()
        self._stats.end()
        loss = self.status.loss()
        if self.status.state not in (EngineState.RESTARTING, EngineState.SLEEPING):
            self.fail_all(loss)
            return
        for stream in self._table.lose_engine(loss):
            stream.opened_s = trio.current_time()
            self._bound_wait(stream)
        self._calls.fail_all(loss)
        self._note_idle()

    async def _read(self, transport: Transport, on_ready: Callable[[Ready], None]) -> None:
        """Take in messages until nobody is left to send any. Never waits for a consumer."""
        try:
            while True:
                for message in await transport.receive():
                    if isinstance(message, Ready):
                        self._begin(message)
                        on_ready(message)
                    else:
                        self._handle(message)
        except PeerGoneError:
            self.status.report_peer_gone(drained=True)
        except ProtocolError as error:
            self.status.mark_dead(f"the engine broke the protocol: {error.message}")

    def _begin(self, ready: Ready) -> None:
        if self._outlet.room:
            raise ProtocolError("a second Ready")
        self.model, self.limits = ready.model, ready.limits
        self._stats.begin(ready.limits)
        self._outlet.open(ready.limits)

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Outputs():
                self._stats.note(message.step, message.stats)
                self._outlet.abort(self._table.deliver(message.deltas, trio.current_time()))
                self._outlet.fill()
                self._note_idle()
            case Accepted():
                self._table.accept(message.request_ids)
            case CallResult():
                self._calls.answer(message)
            case Progress():
                self.status.set_progress(message.phase, message.fraction)
            case Fatal():
                self.status.report_fatal(message.cause, message.traceback, refused=message.refused)
            case Hello() if message.version != PROTOCOL_VERSION:
                # Strangers are the transport's business; in memory there are none.
                raise ProtocolError(f"it speaks version {message.version}")

    def _note_idle(self) -> None:
        if self._table.idle:
            self._idle.unpark_all()


def _end_wait(stream: RequestStream, opened_s: float) -> None:
    """Close a stream that still waits since ``opened_s``."""
    if stream.num_queued and stream.opened_s == opened_s:
        stream.close("queue_timeout")
