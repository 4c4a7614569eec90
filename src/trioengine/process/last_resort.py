"""The last resort: a thread that ends the process when an orderly end outlives its bound.

An orderly end runs through the event loop, through foreign code and through a stranger's socket,
so no bound inside it can be trusted alone. Whoever starts an end arms the last resort first: with
the exit code that is due, so that a supervisor above us (systemd, Kubernetes) reads the same story
either way.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LastResort", "end_process"]


class LastResort:
    """A deadline for the whole process. Real time, never Trio's: it must not depend on the loop.

    Attributes:
        code: The exit code that is due, whoever comes to use it.
        cause: One sentence for the last line on stderr; empty where nothing went wrong.
    """

    def __init__(self, end: Callable[[int, str], None] | None = None) -> None:
        """Make a disarmed one.

        Args:
            end: Ends the process, given code and cause: ``end_process``. ``None`` where the process
                is not ours to end (the library's): then arming only keeps the code.
        """
        self.code = 0
        self.cause = ""
        self._end = end
        self._deadline_s = float("inf")
        self._timer: threading.Timer | None = None

    def arm(self, after_s: float, *, code: int | None = None, cause: str | None = None) -> None:
        """End the process in ``after_s`` unless it has ended by itself.

        Arming again never puts the deadline off. ``code`` and ``cause`` replace what was due.
        """
        self.code = self.code if code is None else code
        self.cause = self.cause if cause is None else cause
        deadline_s = time.monotonic() + after_s
        if self._end is None or deadline_s >= self._deadline_s:
            return
        self.disarm()
        self._deadline_s = deadline_s
        self._timer = threading.Timer(after_s, self._fire, (self._end,))
        self._timer.daemon = True  # the orderly end must not wait for it
        self._timer.start()

    def disarm(self) -> None:
        """Put the deadline away; keep the code."""
        self._deadline_s = float("inf")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self, end: Callable[[int, str], None]) -> None:
        end(self.code, self.cause)


def end_process(code: int, cause: str) -> None:
    """Say why, if anybody reads it within 0.2 s, and be gone."""
    line = f"trioengine: {cause or 'asked to stop'} (what was left was not waited for)\n"
    # Written from a thread of its own: a stderr that nobody reads must not hold the exit.
    writer = threading.Thread(target=os.write, args=(2, line.encode()), daemon=True)
    writer.start()
    writer.join(timeout=0.2)
    os._exit(code)
