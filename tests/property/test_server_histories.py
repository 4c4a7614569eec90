"""Whatever clients, time, wire and engine do to a whole server, every history ends clean.

The invariants are in ``helpers/server_invariants.py``. Histories that have found something stay
below as examples. ``python tests/soak_histories.py`` tries as many as it is told, in parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given

from helpers.server_history import run_history
from helpers.server_operations import (
    COMPLETION,
    Die,
    Flit,
    Nudge,
    Order,
    Pass,
    Setup,
    Step,
    Stop,
    Submit,
    histories,
    setups,
)

if TYPE_CHECKING:
    from helpers.server_operations import Operation

ASK = Submit(COMPLETION, False, 1, 1, 1, 0, None, False, False, False)
STREAM = Submit(COMPLETION, True, 1, 1, 2, 0, None, False, False, False)
LONG = Submit(COMPLETION, True, 1, 1, 40, 0, None, False, False, False)
MANY = Submit(COMPLETION, True, 4, 1, 40, 0, None, False, False, False)
LATE = Submit(COMPLETION, False, 1, 1, 1, 0, None, False, True, False)

# Asked to stop within the 50 ms in which a death finds its cause: clients were told `draining`, or
# nothing.
STOP_UPON_DEATH = [ASK, Nudge(0), Die(None, False, 0.0625)]
# A second signal with a request under way: its client was told of an internal error.
LEAVE_AT_ONCE = [ASK, Stop(), Stop()]
# A second request behind one that was to be the last of its connection: the first one's answer was
# cut short.
PIPELINE_INTO_A_DRAIN = [STREAM, Stop(), Step(1), Nudge(0)]
# A body that is not there yet when the server ends: an internal error again.
DIE_BEFORE_THE_BODY = [LATE, Die(None, False, 0.0), Pass(1.0)]
# Wanted asleep again while it wakes up: who had woken it waited for the next who would.
DO_NOT_WAKE_AFTER_ALL = [Order(True, 0.0), Order(False, 0.0), Order(True, 0.0), Pass(1.0)]

# These have found nothing, but kill mutants that drawn histories kill only by chance.
LEAVE_BEHIND_ITS_OWN_ADD = [LONG, Step(1), Flit(LONG, "execute"), Step(1)]
WAIT_TOO_LONG_IN_THE_QUEUE = [MANY, ASK, Pass(3.0)]


@example(LEAVE_BEHIND_ITS_OWN_ADD, Setup())
@example(WAIT_TOO_LONG_IN_THE_QUEUE, Setup())
@example(STOP_UPON_DEATH, Setup())
@example(LEAVE_AT_ONCE, Setup())
@example(PIPELINE_INTO_A_DRAIN, Setup())
@example(DIE_BEFORE_THE_BODY, Setup())
@example(DO_NOT_WAKE_AFTER_ALL, Setup(start_s=0.4))
@given(histories, setups)
def test_any_history_of_a_server_ends_clean(history: list[Operation], setup: Setup) -> None:
    run_history(history, setup)
