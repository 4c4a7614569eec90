"""The way to the engine, whichever incarnation: never waits, never raises, never sends to the dead.

The queue is the server's. The engine holds at most twice ``max_num_seqs`` sequences, running and
waiting, so that it never starves and what leaves the queue costs it nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from trioengine.errors import PeerGoneError, ProtocolError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import Abort

if TYPE_CHECKING:
    from trioengine.client.engine_status import EngineStatus
    from trioengine.client.stream_table import StreamTable
    from trioengine.client.transport import Transport
    from trioengine.protocol import ClientMessage, EngineLimits

__all__ = ["Outlet"]

LOOK_AHEAD: Final = 2  # times max_num_seqs: as many waiting in the engine as can run


class Outlet:
    """Sends to whoever is attached.

    Attributes:
        room: Sequences that the engine may hold; 0 while there is none that is ready.
    """

    def __init__(self, status: EngineStatus, table: StreamTable) -> None:
        """Begin with nobody attached."""
        self.room = 0
        self._status = status
        self._table = table
        self._transport: Transport | None = None

    def attach(self, transport: Transport) -> None:
        """Send to ``transport`` from now on. Raises ``ProtocolError`` beside another one."""
        if self._transport is not None:
            raise ProtocolError("another engine incarnation is attached")
        self._transport = transport

    def detach(self) -> None:
        """Send to nobody. Idempotent."""
        self._transport = None
        self.room = 0

    def open(self, limits: EngineLimits) -> None:
        """Take note that the engine is ready, and send it what waits."""
        self.room = LOOK_AHEAD * limits.max_num_seqs
        self.fill()

    def fill(self) -> None:
        """Fill the engine's look-ahead from the queue."""
        while self._table.num_sent < self.room and not self._status.engine_is_gone:
            sequence = self._table.take_next(trio.current_time())
            if sequence is None:
                return
            try:
                self.send(sequence.take_add(again=sequence.stream.replayable))
            except (OverflowError, TypeError, ValueError) as error:
                # It can't be encoded: as if the engine had refused it, at once.
                self._refuse(sequence.request_id, f"{type(error).__name__}: {error}")

    def abort(self, request_ids: list[int]) -> None:
        """Abort these, with at most one frame."""
        if request_ids:
            self.send(Abort(request_ids))

    def send(self, message: ClientMessage) -> None:
        """Send, or report that nobody is there: then what it was about fails with the engine."""
        if self._transport is None:
            return
        try:
            self._transport.send(message)
        except PeerGoneError:
            self._status.report_peer_gone()

    def _refuse(self, request_id: int, error: str) -> None:
        terminal = RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
        self.abort(self._table.deliver([terminal], trio.current_time()))
