"""How often a dead engine may be started again, and how long to wait before. Pure but for a clock.

Deaths are counted over ten minutes *of service*: time in which no engine was ready does not pass.
So an engine that takes long to load and dies of its first request is given up after as many deaths
as one that loads in a second, and one that dies now and then in a week is started again for ever.
"""

from __future__ import annotations

import collections
from typing import Final

__all__ = ["WINDOW_S", "RestartBudget"]

WINDOW_S: Final = 600.0
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0


class RestartBudget:
    """Counts deaths.

    Attributes:
        limit: Most restarts within ``WINDOW_S`` of service.
    """

    def __init__(self, limit: int = 0) -> None:
        """Begin before the first engine is ready."""
        self.limit = limit
        self._served_s = 0.0
        self._ready_s: float | None = None
        self._deaths: collections.deque[float] = collections.deque()  # in seconds of service

    @property
    def num_deaths(self) -> int:
        """Deaths that count, as of the last one."""
        return len(self._deaths)

    @property
    def wait_s(self) -> float:
        """How long to wait before the next start: twice as long for each death that counts."""
        doublings = max(0, len(self._deaths) - 1)
        return float(min(FIRST_WAIT_S * 2.0 ** min(doublings, 16), LONGEST_WAIT_S))

    def note_ready(self, now_s: float) -> None:
        """Take note that an engine serves from now on."""
        if self._ready_s is None:
            self._ready_s = now_s

    def note_death(self, now_s: float) -> bool:
        """Count a death, of an engine that served or of one that did not get that far.

        Returns:
            True where another may be started.
        """
        if self._ready_s is not None:
            self._served_s += now_s - self._ready_s
            self._ready_s = None
        while self._deaths and self._served_s - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(self._served_s)
        return len(self._deaths) <= self.limit
