"""What state the engine is in, and why: one machine for as long as the server lives.

Theory of operation
-------------------
The state moves along ``TRANSITIONS`` and nowhere else. Each engine incarnation dies its own death
(``death``), of which three sensors may tell: its last word (``report_fatal``), the end of its
process (``report_exit``), a wire on which nobody is left (``report_peer_gone``). The first of them
moves the state at once: new requests are refused or wait, and health says so. It moves to DEAD, or
to RESTARTING where the budget allows one more start: the server serves on, and ``begin_again``
makes room for the death of the next incarnation.

A stall is a state of its own only where the engine would be READY otherwise. An engine that
finishes what runs before it sleeps or leaves can stall as well: the state stays what it is then,
and ``stall`` says why.

Once STOPPED, the end of the engine is what was asked for, and every report is ignored.
"""

from __future__ import annotations

import enum
from typing import Final

import trio

from trioengine.client.engine_death import EXIT_S, SETTLE_S, EngineDeath, Sensor
from trioengine.client.restart_budget import RestartBudget
from trioengine.errors import EngineDeadError, ProtocolError, UnavailableError

__all__ = ["EXIT_S", "SETTLE_S", "TRANSITIONS", "EngineEvent", "EngineState", "EngineStatus"]

RETRY_AFTER_S: Final = 1.0  # where the server itself will come back


class EngineState(enum.StrEnum):
    """Where the engine stands."""

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
    FALL = "fall"  # it died, and another is to come
    SLEEP = "sleep"


_S, _E = EngineState, EngineEvent
_SERVING: Final = (_S.READY, _S.STALLED, _S.SLEEPING)
_FINISHING: Final = (_S.SLEEPING, _S.DRAINING)
_ALIVE: Final = (_S.STARTING, *_SERVING, _S.DRAINING, _S.RESTARTING)

TRANSITIONS: Final[dict[tuple[EngineState, EngineEvent], EngineState]] = {
    (_S.STARTING, _E.READY): _S.READY,
    (_S.RESTARTING, _E.READY): _S.READY,
    (_S.SLEEPING, _E.READY): _S.READY,
    (_S.READY, _E.SLEEP): _S.SLEEPING,
    (_S.READY, _E.STALL): _S.STALLED,
    (_S.STALLED, _E.RECOVER): _S.READY,
    **{(state, event): state for state in _FINISHING for event in (_E.STALL, _E.RECOVER)},
    **{(state, _E.FALL): _S.RESTARTING for state in (*_SERVING, _S.RESTARTING)},
    **{(state, _E.DRAIN): _S.DRAINING for state in (_S.STARTING, *_SERVING, _S.RESTARTING)},
    **{(state, _E.STOP): _S.STOPPED for state in _ALIVE},
    **{(state, _E.DIE): _S.DEAD for state in _ALIVE},
    # Cleanup and late sensors come in any order: what is over stays over, as it was.
    **{(state, event): state for state in (_S.STOPPED, _S.DEAD) for event in (_E.STOP, _E.DIE)},
}

_REASONS: Final = {
    _E.READY: "",
    _E.RECOVER: "",
    _E.SLEEP: "the engine has been put to sleep",
    _E.DRAIN: "the server is shutting down",
    _E.STOP: "the server has been shut down",
}


class EngineStatus:
    """The engine's state, as everything in the server sees it.

    Attributes:
        state: Now.
        reason: One sentence on why; empty while all is well.
        since_s: When this state was entered, ``trio.current_time()``.
        stall: Why the present engine counts as stalled, in whatever state; empty while it moves.
        progress: Phase and fraction in [0, 1] of a start, once something is known.
        was_ready: It has been READY at least once.
        death: Of the present incarnation, or of the last while there is none.
        dismissed: The present incarnation was asked to leave: its end is no death.
        wakes_on_request: Requests are welcome to wait while it sleeps.
        dead: Set when the state is DEAD; ``reason`` may still improve.
        restarts: Says whether a dead engine is started again.
        traceback: The engine's own, with its last word; for the log.
        refused: Its last word was that it cannot be what it was told to be.
    """

    def __init__(
        self, restarts: RestartBudget | None = None, *, wakes_on_request: bool = False
    ) -> None:
        """Begin STARTING, now; without ``restarts``, one death is the end."""
        self.state = EngineState.STARTING
        self.reason = "the engine is starting"
        self.since_s = trio.current_time()
        self.stall = ""
        self.progress: tuple[str, float] | None = None
        self.was_ready = False
        self.death = EngineDeath()
        self.dismissed = False
        self.wakes_on_request = wakes_on_request
        self.dead = trio.Event()
        self.restarts = RestartBudget() if restarts is None else restarts
        self.traceback = ""
        self.refused = False

    def __repr__(self) -> str:
        return f"<EngineStatus {self.state}{f': {self.reason}' if self.reason else ''}>"

    # The life -------------------------------------------------------------------------------

    def set_progress(self, phase: str, fraction: float) -> None:
        """Note how far the start has come; after it, progress is old news and ignored."""
        if self.state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.SLEEPING):
            self.progress = phase, fraction

    def mark_ready(self) -> None:
        """Say that it takes requests. Raises ``ProtocolError`` where it did, or never will."""
        self._advance(EngineEvent.READY)
        self.restarts.note_ready(self.since_s)
        self.was_ready = True
        self.stall, self.progress = "", None

    def mark_stalled(self, reason: str) -> None:
        """Say that it does not move. Raises ``ProtocolError`` unless READY, SLEEPING, DRAINING."""
        self._advance(EngineEvent.STALL, reason)
        self.stall = reason

    def mark_recovered(self) -> None:
        """Say that it moves again. Raises ``ProtocolError`` as ``mark_stalled`` does."""
        self._advance(EngineEvent.RECOVER)
        self.stall = ""

    def mark_sleeping(self) -> None:
        """Take no requests, and sleep when the last has ended. Raises unless READY."""
        self._advance(EngineEvent.SLEEP)

    def dismiss(self) -> None:
        """Say that the present incarnation is about to be asked to leave, and no other will be."""
        self.dismissed = True

    def mark_draining(self) -> None:
        """Refuse new requests. Raises ``ProtocolError`` where it drains, stopped or died."""
        self._advance(EngineEvent.DRAIN)

    def mark_stopped(self) -> None:
        """Say that the engine is about to leave because it was asked to. Idempotent.

        To be called before it is asked, or its end is taken for a death. A dead engine stays dead.
        """
        self._advance(EngineEvent.STOP)

    @property
    def engine_is_gone(self) -> bool:
        """True where the present incarnation can be given nothing more to do."""
        return self.dismissed or self.death.seen.is_set()

    def refusal(self) -> UnavailableError | None:
        """Return a new instance of what a new request gets now, ``None`` if it is welcome.

        It is welcome to wait where the engine is being started again, or can be woken up.
        """
        state = self.state
        if state is EngineState.SLEEPING:
            error = UnavailableError(self.reason, code=state.value)
            return None if self.wakes_on_request else error
        if state in (EngineState.READY, EngineState.RESTARTING):
            return None
        if state is EngineState.DEAD:
            return EngineDeadError(self.reason)
        if state is EngineState.STOPPED:
            return UnavailableError(self.reason, code=EngineState.DRAINING.value)
        return UnavailableError(self.reason, code=state.value, retry_after_s=RETRY_AFTER_S)

    def loss(self) -> UnavailableError:
        """Return a new instance of what a request gets that has lost its engine."""
        if self.state is EngineState.DEAD:
            return EngineDeadError(self.reason)
        if self.state is EngineState.RESTARTING:
            return EngineDeadError(
                f"the engine died and is being started again: {self.reason}",
                code=EngineState.RESTARTING.value,
                retry_after_s=RETRY_AFTER_S,
            )
        if self.state is EngineState.SLEEPING:
            return UnavailableError(self.reason, code=EngineState.SLEEPING.value)
        return UnavailableError("the server is shutting down", code=EngineState.DRAINING.value)

    # The death ------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Make room for the next incarnation, and its death. Raises unless it died or sleeps."""
        if self.state not in (EngineState.RESTARTING, EngineState.SLEEPING):
            raise ProtocolError(f"no engine follows one that is {self.state}")
        self.death = EngineDeath()
        self.dismissed = False
        self.traceback, self.refused, self.progress = "", False, None

    def mark_dead(self, reason: str, *, final: bool = False) -> None:
        """Say that it is dead, of this cause and no other; ``final``: whatever the budget says."""
        self._report(Sensor.LAST_WORD, reason, final=final)

    def report_fatal(self, cause: str, traceback: str = "", *, refused: bool = False) -> None:
        """Sensor: the engine's own last word; ``refused`` where the configuration is at fault."""
        if self._report(Sensor.LAST_WORD, cause):
            self.traceback = traceback
            self.refused = refused

    def report_exit(self, reason: str) -> None:
        """Sensor: its process has ended; ``reason`` says how, with its last line of output."""
        self._report(Sensor.EXIT, reason)

    def report_peer_gone(self, *, drained: bool = False) -> None:
        """Sensor: nobody is at the other end of the wire.

        Args:
            drained: Everything that it had sent has been received: no last word can come.
        """
        if drained:
            self.death.note_drained()
        self._report(Sensor.WIRE, "the engine has closed its end of the wire")

    async def wait_settled(self) -> None:
        """Wait until it is DEAD and the cause frozen, within 50 ms of the end of its process."""
        await self.dead.wait()
        await self.death.wait_settled()

    def _report(self, sensor: Sensor, reason: str, *, final: bool = False) -> bool:
        """Weigh one report; False where it comes too late, or the end was asked for."""
        if self.state is EngineState.STOPPED or self.dismissed:
            return False
        if not self.death.seen.is_set():
            self._advance(self._fate(final=final), reason)
            self.stall = ""
        if not self.death.report(sensor, reason):
            return False
        self.reason = self.death.cause
        if self.state is EngineState.DEAD:
            self.dead.set()
        return True

    def _fate(self, *, final: bool) -> EngineEvent:
        """Return what a death leads to, and count it. Only what once served is started again."""
        may_fall = (self.state, EngineEvent.FALL) in TRANSITIONS and not final
        if may_fall and self.restarts.note_death(trio.current_time()):
            return EngineEvent.FALL
        return EngineEvent.DIE

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
