"""A slow engine is not a stalled one, and a stalled one is not a dead one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from trioengine.client.engine_status import EngineState, EngineStatus
from trioengine.heartbeat import Heartbeat
from trioengine.process.heartbeat_watch import StallJudge, watch_heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_S = 5.0
STALL_S = 60.0


def judge(*looks: tuple[float, Heartbeat]) -> list[str | None]:
    """Look at each page at its time, 4 times a second in between at the page before it."""
    first_s = looks[0][0]
    judge = StallJudge(beat_timeout_s=BEAT_S, stall_timeout_s=STALL_S, now_s=first_s)
    return [judge.judge(page, now_s) for now_s, page in looks]


def watched(page: Callable[[float], Heartbeat], seconds: float) -> list[str | None]:
    """Return the verdicts of looks four times a second."""
    looks = [(tick / 4, page(tick / 4)) for tick in range(int(seconds * 4) + 1)]
    return judge(*looks)


def test_an_engine_that_beats_is_well_however_little_it_does() -> None:
    assert not any(watched(lambda now: Heartbeat("idle", 0, 0.0, now // 1), 600.0))


def test_a_silent_engine_is_stalled_after_the_bound() -> None:
    verdicts = watched(lambda now: Heartbeat("idle", 0, 0.0, min(now, 10.0)), 20.0)
    assert not any(verdicts[: 15 * 4 + 1])
    assert all(verdicts[15 * 4 + 1 :])
    assert verdicts[-1] == "the engine process has shown no sign of life for 10 s"


def test_it_is_well_again_with_its_next_beat() -> None:
    verdicts = watched(lambda now: Heartbeat("idle", 0, 0.0, 0.0 if now < 20 else now), 21.0)
    assert verdicts[19 * 4] is not None
    assert verdicts[-1] is None


def test_a_step_may_be_long_but_not_endless() -> None:
    verdicts = watched(lambda now: Heartbeat("step", 7, 0.0, now), 61.0)
    assert not any(verdicts[: 60 * 4 + 1])
    assert verdicts[-1] == "step 7 has been running for 61 s"


def test_a_page_that_was_never_beaten_on_counts_from_the_first_look() -> None:
    verdicts = watched(lambda now: Heartbeat("idle", 0, 0.0, 0.0), 6.0)
    assert [verdict is None for verdict in verdicts].count(False) == 4


def test_time_in_which_the_watcher_did_not_run_is_not_held_against_the_beat() -> None:
    """The machine slept for an hour; the engine has not had time to beat again."""
    page = Heartbeat("idle", 0, 0.0, 100.0)
    assert judge((100.0, page), (3700.0, page), (3704.9, page))[1:] == [None, None]
    slept_and_stuck = judge((100.0, page), *((3700.0 + n, page) for n in range(8)))
    assert slept_and_stuck[-1] is not None


async def test_the_state_follows_the_page(autojump_clock: trio.testing.MockClock) -> None:
    status = EngineStatus()
    beating = True
    silent_since_s = 0.0

    def page() -> Heartbeat:
        return Heartbeat("idle", 0, 0.0, trio.current_time() if beating else silent_since_s)

    watch = partial(
        watch_heartbeat,
        page,
        status,
        beat_timeout_s=BEAT_S,
        stall_timeout_s=STALL_S,
        clock=trio.current_time,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        silent_since_s, beating = trio.current_time(), False
        await trio.sleep(100.0)
        states = [status.state]  # STARTING is not judged
        status.mark_ready()
        await trio.sleep(1.0)
        states.append(status.state)
        beating = True
        await trio.sleep(1.0)
        states.append(status.state)
        silent_since_s, beating = trio.current_time(), False
        await trio.sleep(BEAT_S - 0.5)
        states.append(status.state)
        await trio.sleep(1.25)  # between two looks
        states.append(status.state)
        status.mark_draining()
        beating = True
        await trio.sleep(10.0)
        states.append(status.state)  # DRAINING has its own bounds
        nursery.cancel_scope.cancel()
    assert states == [
        EngineState.STARTING,
        EngineState.STALLED,
        EngineState.READY,
        EngineState.READY,
        EngineState.STALLED,
        EngineState.DRAINING,
    ]


@pytest.mark.parametrize("end", [EngineStatus.mark_stopped, lambda s: s.mark_dead("x")])
async def test_what_is_over_is_left_alone(
    end: Callable[[EngineStatus], None], autojump_clock: trio.testing.MockClock
) -> None:
    status = EngineStatus()
    status.mark_ready()
    end(status)
    over = status.state
    with trio.move_on_after(100.0):
        await watch_heartbeat(
            lambda: Heartbeat("idle", 0, 0.0, 0.0),
            status,
            beat_timeout_s=BEAT_S,
            stall_timeout_s=STALL_S,
            clock=trio.current_time,
        )
    assert status.state is over
