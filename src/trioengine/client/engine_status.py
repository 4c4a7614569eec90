"""What state the engine is in, and why: one machine, many sensors, one cause of death.

Theory of operation
-------------------
The state moves along ``TRANSITIONS`` and nowhere else. Death may be seen by three sensors: the
engine's own last word (``report_fatal``), the end of its process (``report_exit``), and a wire on
which nobody is left (``report_peer_gone``). The first that speaks makes the state DEAD at once:
new requests are refused and health says so. The *cause* is chosen among everything said within
50 ms of that, in the order just given, because the sensor that is quickest knows least; then it is
frozen (``settled``). No task is needed for that: a report that comes later is ignored, and whoever
waits in ``wait_settled`` freezes the cause when the time is up. It is settled before, where no
report could improve it: after a last word, or when the process has ended and its wire is drained.

Once STOPPED, the end of the engine is what was asked for, and every report is ignored.
"""

from __future__ import annotations

import enum
from typing import Final

import trio

from trioengine.errors import EngineDeadError, ProtocolError, UnavailableError

__all__ = ["SETTLE_S", "TRANSITIONS", "EngineEvent", "EngineState", "EngineStatus"]

SETTLE_S: Final = 0.05  # from the first sign of death to its frozen cause
RETRY_AFTER_S: Final = 1.0  # where the server itself will come back


class EngineState(enum.StrEnum):
    """Where the engine stands. Nothing enters SLEEPING or RESTARTING yet; their names are set."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"
    RESTARTING = "restarting"


class EngineEvent(enum.StrEnum):
    """What moves it."""

    READY = "ready"
    STALL = "stall"
    RECOVER = "recover"
    DRAIN = "drain"
    STOP = "stop"
    DIE = "die"


_S, _E = EngineState, EngineEvent
_ALIVE: Final = (_S.STARTING, _S.READY, _S.STALLED, _S.DRAINING)

TRANSITIONS: Final[dict[tuple[EngineState, EngineEvent], EngineState]] = {
    (_S.STARTING, _E.READY): _S.READY,
    (_S.READY, _E.STALL): _S.STALLED,
    (_S.STALLED, _E.RECOVER): _S.READY,
    **{(state, _E.DRAIN): _S.DRAINING for state in (_S.STARTING, _S.READY, _S.STALLED)},
    **{(state, _E.STOP): _S.STOPPED for state in _ALIVE},
    **{(state, _E.DIE): _S.DEAD for state in _ALIVE},
    # Cleanup and late sensors come in any order: what is over stays over, as it was.
    **{(state, event): state for state in (_S.STOPPED, _S.DEAD) for event in (_E.STOP, _E.DIE)},
}

_REASONS: Final = {
    _E.READY: "",
    _E.RECOVER: "",
    _E.DRAIN: "the server is shutting down",
    _E.STOP: "the server has been shut down",
}


class _Sensor(enum.IntEnum):
    """Who tells of a death; the lowest knows best."""

    LAST_WORD = 0
    EXIT = 1
    WIRE = 2


class EngineStatus:
    """The engine's state, as everything in the server sees it.

    Attributes:
        state: Now.
        reason: One sentence on why; empty while all is well.
        since_s: When this state was entered, ``trio.current_time()``.
        progress: Phase and fraction in [0, 1] while STARTING, once something is known.
        was_ready: It has been READY at least once.
        dead: Set at the first sign of death; ``reason`` may still improve.
        settled: Set when the cause of death is frozen.
        traceback: The engine's own, with its last word; for the log.
        refused: Its last word was that it cannot be what it was told to be.
    """

    def __init__(self) -> None:
        """Begin STARTING, now. Must be made within a Trio run."""
        self.state = EngineState.STARTING
        self.reason = "the engine is starting"
        self.since_s = trio.current_time()
        self.progress: tuple[str, float] | None = None
        self.was_ready = False
        self.dead = trio.Event()
        self.settled = trio.Event()
        self.traceback = ""
        self.refused = False
        self._reports: dict[_Sensor, str] = {}
        self._drained = False

    def __repr__(self) -> str:
        return f"<EngineStatus {self.state}{f': {self.reason}' if self.reason else ''}>"

    # The life -------------------------------------------------------------------------------

    def set_progress(self, phase: str, fraction: float) -> None:
        """Note how far the start has come; after it, progress is old news and ignored."""
        if self.state is EngineState.STARTING:
            self.progress = phase, fraction

    def mark_ready(self) -> None:
        """Say that requests are welcome. Raises ``ProtocolError`` unless STARTING."""
        self._advance(EngineEvent.READY)
        self.was_ready = True
        self.progress = None

    def mark_stalled(self, reason: str) -> None:
        """Say that it does not move. Raises ``ProtocolError`` unless READY."""
        self._advance(EngineEvent.STALL, reason)

    def mark_recovered(self) -> None:
        """Say that it moves again. Raises ``ProtocolError`` unless STALLED."""
        self._advance(EngineEvent.RECOVER)

    def mark_draining(self) -> None:
        """Refuse new requests. Raises ``ProtocolError`` where it drains, stopped or died."""
        self._advance(EngineEvent.DRAIN)

    def mark_stopped(self) -> None:
        """Say that the engine is about to leave because it was asked to. Idempotent.

        To be called before it is asked, or its end is taken for a death. A dead engine stays dead.
        """
        self._advance(EngineEvent.STOP)

    def refusal(self) -> UnavailableError | None:
        """Return a new instance of what a new request gets now, ``None`` if it is welcome."""
        state = self.state
        if state is EngineState.READY:
            return None
        if state is EngineState.DEAD:
            return EngineDeadError(self.reason)
        if state is EngineState.STOPPED:
            return UnavailableError(self.reason, code=EngineState.DRAINING.value)
        return UnavailableError(self.reason, code=state.value, retry_after_s=RETRY_AFTER_S)

    # The death ------------------------------------------------------------------------------

    def mark_dead(self, reason: str) -> None:
        """Say that it is dead, of this cause and no other."""
        self._report(_Sensor.LAST_WORD, reason)

    def report_fatal(self, cause: str, traceback: str = "", *, refused: bool = False) -> None:
        """Sensor: the engine's own last word; ``refused`` where the configuration is at fault."""
        if self._report(_Sensor.LAST_WORD, cause):
            self.traceback = traceback
            self.refused = refused

    def report_exit(self, reason: str) -> None:
        """Sensor: its process has ended; ``reason`` says how, with its last line of output."""
        self._report(_Sensor.EXIT, reason)

    def report_peer_gone(self, *, drained: bool = False) -> None:
        """Sensor: nobody is at the other end of the wire.

        Args:
            drained: Everything that it had sent has been received: no last word can come.
        """
        self._drained |= drained
        self._report(_Sensor.WIRE, "the engine has closed its end of the wire")

    async def wait_settled(self) -> None:
        """Wait until it is dead and the cause frozen, at most 50 ms after the first sign."""
        await self.dead.wait()
        with trio.move_on_at(self.since_s + SETTLE_S):
            await self.settled.wait()
        self.settled.set()

    def _report(self, sensor: _Sensor, reason: str) -> bool:
        """Weigh one report; False where it comes too late, or the end was asked for."""
        left = self._advance(EngineEvent.DIE, reason)
        if self.state is not EngineState.DEAD:
            return False
        if left is EngineState.DEAD and trio.current_time() > self.since_s + SETTLE_S:
            self.settled.set()
        if self.settled.is_set():
            return False
        self._reports.setdefault(sensor, reason)
        self.reason = self._reports[min(self._reports)]
        self.dead.set()
        if _Sensor.LAST_WORD in self._reports or (self._drained and _Sensor.EXIT in self._reports):
            self.settled.set()
        return True

    # The machine ----------------------------------------------------------------------------

    def _advance(self, event: EngineEvent, reason: str | None = None) -> EngineState:
        """Move along the table; return the state that was left.

        Raises:
            ProtocolError: The table has no such edge. Nothing has changed then.
        """
        left = self.state
        try:
            state = TRANSITIONS[left, event]
        except KeyError:
            raise ProtocolError(f"an engine that is {left} cannot {event}") from None
        if state is not left:
            self.state = state
            self.reason = _REASONS[event] if reason is None else reason
            self.since_s = trio.current_time()
        return left
