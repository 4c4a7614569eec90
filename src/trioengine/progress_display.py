"""Show where a start stands: a bar when stderr is a terminal, a line now and then otherwise."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Final

import trio

from trioengine.client.engine_status import EngineState, EngineStatus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Narrator", "bar", "show_progress", "terminal_drawer"]

LOOK_EVERY_S: Final = 0.2
LINE_EVERY_S: Final = 9.5  # with one look's delay, never more than 10
BAR_WIDTH: Final = 30
UNKNOWN: Final = ("starting", 0.0)

logger = logging.getLogger(__name__)


def bar(phase: str, fraction: float) -> str:
    """Return one line: the phase, how much of it is done, and a bar of that."""
    done = round(min(max(fraction, 0.0), 1.0) * BAR_WIDTH)
    return f"{phase}  [{'#' * done}{'-' * (BAR_WIDTH - done)}] {fraction:4.0%}"


def terminal_drawer(draw: Callable[[str], None]) -> Callable[[str], None] | None:
    """Return ``draw`` where stderr is a terminal, ``None`` where it is not."""
    return draw if sys.stderr is not None and sys.stderr.isatty() else None


class Narrator:
    """Tells of progress without telling too much."""

    def __init__(
        self,
        draw: Callable[[str], None] | None,
        *,
        say: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin silent.

        Args:
            draw: Draws a line over the one before, empty to erase it; ``None`` where there is no
                terminal: then each phase, and every 10 s of one, is a line of its own.
            say: Takes such a line.
            clock: Any clock, in seconds.
        """
        self._draw = draw
        self._say = say
        self._clock = clock
        self._phase = ""
        self._said_at_s = 0.0

    def tell(self, phase: str, fraction: float) -> None:
        """Show that ``fraction`` of ``phase`` is done."""
        if self._draw is not None:
            self._draw(bar(phase, fraction))
            return
        now_s = self._clock()
        if phase != self._phase or now_s - self._said_at_s >= LINE_EVERY_S:
            self._say(f"{phase} ({fraction:.0%})")
            self._phase, self._said_at_s = phase, now_s

    def end(self) -> None:
        """Erase what is drawn."""
        if self._draw is not None:
            self._draw("")


async def show_progress(status: EngineStatus, narrator: Narrator) -> None:
    """Follow ``status`` until it is no longer STARTING."""
    try:
        while status.state is EngineState.STARTING:
            narrator.tell(*(status.progress or UNKNOWN))
            await trio.sleep(LOOK_EVERY_S)
    finally:
        narrator.end()
