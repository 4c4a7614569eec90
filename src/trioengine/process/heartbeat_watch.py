"""Tell a slow engine from a stalled one by looking at its heartbeat page.

Stalled means one of two things: no beat for ``beat_timeout_s`` (the process is stopped or starved;
the lifeline thread beats once a second, also during a long step), or one step older than
``stall_timeout_s``. Neither is death: the state goes back to ready by itself once the engine moves,
unless the user wants something done about it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

from trioengine.client.engine_status import EngineState, EngineStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioengine.heartbeat import Heartbeat

__all__ = ["StallJudge", "watch_heartbeat"]

LOOK_EVERY_S: Final = 0.5
_JUDGED: Final = frozenset(
    {EngineState.READY, EngineState.STALLED, EngineState.SLEEPING, EngineState.DRAINING}
)


class StallJudge:
    """Says why an engine counts as stalled, from one look at its page to the next."""

    def __init__(self, *, beat_timeout_s: float, stall_timeout_s: float, now_s: float) -> None:
        self._beat_timeout_s = beat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._looked_s = now_s
        self._watching_since_s = now_s

    def judge(self, beat: Heartbeat, now_s: float) -> str | None:
        """Return the reason to call the engine stalled, ``None`` if it is well.

        Where the watcher itself did not run (suspended machine, starved server), nothing that
        the engine left undone in that time is held against its beat.
        """
        if now_s - self._looked_s > self._beat_timeout_s / 2:
            self._watching_since_s = now_s
        self._looked_s = now_s
        silent_s = now_s - max(beat.last_beat_s, self._watching_since_s)
        if silent_s > self._beat_timeout_s:
            return f"the engine process has shown no sign of life for {silent_s:.0f} s"
        step_s = now_s - beat.step_started_s
        if beat.phase == "step" and step_s > self._stall_timeout_s:
            return f"step {beat.step} has been running for {step_s:.0f} s"
        return None


async def watch_heartbeat(
    read: Callable[[], Heartbeat],
    status: EngineStatus,
    *,
    beat_timeout_s: float,
    stall_timeout_s: float,
    on_stall: Callable[[str], None] = lambda reason: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tell ``status`` when the engine stalls and when it moves again, until cancelled.

    Args:
        read: Looks at the heartbeat page.
        status: Judged while the engine serves or finishes what runs: loading code may hold the
            interpreter for seconds, and one that was asked to leave or is dead has other bounds.
        beat_timeout_s: Longest silence.
        stall_timeout_s: Longest step.
        on_stall: Told why, once the state says so.
        clock: The page's clock, which is not Trio's.
    """
    judge = StallJudge(
        beat_timeout_s=beat_timeout_s, stall_timeout_s=stall_timeout_s, now_s=clock()
    )
    while True:
        reason = judge.judge(read(), clock())
        if status.state in _JUDGED and not status.engine_is_gone:
            if reason is None and status.stall:
                status.mark_recovered()
            elif reason is not None and not status.stall:
                status.mark_stalled(reason)
                on_stall(reason)
        await trio.sleep(LOOK_EVERY_S)
