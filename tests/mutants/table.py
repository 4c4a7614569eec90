"""What must never happen, and for each a way to make it happen that some test must notice.

``nox -s mutants`` applies each to a copy of the sources and must see its tests go red. A mutant is
a slip that could happen: a line that is not there, a comparison that is off by one, a guard that
lets everything pass. ``HISTORIES`` are the random histories of a whole server; where a mutant names
other tests, those are the ones whose business it is.
"""

from __future__ import annotations

from typing import Final

from mutants.mutant import Mutant
from mutants.of_engines import CRASH_SLIPS, DRAIN_SLIPS, OUTLIVES_SLIPS, RESTART_SLIPS, SLEEP_SLIPS
from mutants.of_requests import ABORT_SLIPS, BLOCKS_SLIPS, QUEUE_SLIPS, TERMINAL_SLIPS

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: Final = (
    *ABORT_SLIPS,
    *CRASH_SLIPS,
    *QUEUE_SLIPS,
    *DRAIN_SLIPS,
    *BLOCKS_SLIPS,
    *TERMINAL_SLIPS,
    *RESTART_SLIPS,
    *OUTLIVES_SLIPS,
    *SLEEP_SLIPS,
)
