"""One state machine, three sensors of death, one cause."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioengine.client.engine_status import (
    EXIT_S,
    SETTLE_S,
    TRANSITIONS,
    EngineEvent,
    EngineState,
    EngineStatus,
)
from trioengine.errors import EngineDeadError, ProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

ACTIONS: dict[EngineEvent, Callable[[EngineStatus], None]] = {
    EngineEvent.READY: EngineStatus.mark_ready,
    EngineEvent.STALL: lambda status: status.mark_stalled("no beat for 5 s"),
    EngineEvent.RECOVER: EngineStatus.mark_recovered,
    EngineEvent.DRAIN: EngineStatus.mark_draining,
    EngineEvent.STOP: EngineStatus.mark_stopped,
    EngineEvent.DIE: lambda status: status.mark_dead("it was killed"),
    EngineEvent.SLEEP: EngineStatus.mark_sleeping,
    EngineEvent.FALL: lambda status: _advance(status, EngineEvent.FALL),
}
WAY_TO: dict[EngineState, list[EngineEvent]] = {
    EngineState.STARTING: [],
    EngineState.READY: [EngineEvent.READY],
    EngineState.STALLED: [EngineEvent.READY, EngineEvent.STALL],
    EngineState.DRAINING: [EngineEvent.READY, EngineEvent.DRAIN],
    EngineState.STOPPED: [EngineEvent.STOP],
    EngineState.DEAD: [EngineEvent.DIE],
    EngineState.RESTARTING: [EngineEvent.READY, EngineEvent.FALL],
    EngineState.SLEEPING: [EngineEvent.READY, EngineEvent.SLEEP],
}


def _advance(status: EngineStatus, event: EngineEvent) -> None:
    status._advance(event, "it was killed")


def status_in(state: EngineState) -> EngineStatus:
    status = EngineStatus()
    for event in WAY_TO[state]:
        ACTIONS[event](status)
    assert status.state is state
    return status


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WAY_TO, EngineEvent)))
async def test_every_pair_is_in_the_table_or_raises_and_changes_nothing(
    state: EngineState, event: EngineEvent, autojump_clock: MockClock
) -> None:
    status = status_in(state)
    before = status.state, status.reason, status.since_s, status.dead.is_set()
    await trio.sleep(1)
    expected = TRANSITIONS.get((state, event))
    if expected is None:
        with pytest.raises(ProtocolError, match=f"that is {state}"):
            ACTIONS[event](status)
        assert (status.state, status.reason, status.since_s, status.dead.is_set()) == before
        return
    ACTIONS[event](status)
    assert status.state is expected
    assert status.since_s == (before[2] if expected is state else trio.current_time())


async def test_what_is_over_is_never_left() -> None:
    ends = {EngineState.DEAD, EngineState.STOPPED}
    assert all(to is state for (state, _), to in TRANSITIONS.items() if state in ends)


def said(status: EngineStatus) -> tuple[str, tuple[str, float] | None]:
    return status.reason, status.progress


async def test_reason_and_progress_follow_the_state() -> None:
    status = EngineStatus()
    status.set_progress("load", 0.25)
    assert said(status) == ("the engine is starting", ("load", 0.25))
    status.mark_ready()
    status.set_progress("load", 1.0)  # late
    assert said(status) == ("", None)
    assert status.was_ready
    status.mark_stalled("no beat for 5 s")
    assert status.reason == "no beat for 5 s"
    status.mark_recovered()
    assert status.reason == ""


@pytest.mark.parametrize(
    ("state", "code", "comes_back"),
    [
        (EngineState.STARTING, "starting", True),
        (EngineState.STALLED, "stalled", True),
        (EngineState.DRAINING, "draining", True),
        (EngineState.SLEEPING, "sleeping", False),
        (EngineState.STOPPED, "draining", False),
        (EngineState.DEAD, "engine_dead", False),
    ],
)
async def test_refusal_says_why_and_whether_to_come_back(
    state: EngineState, code: str, comes_back: bool
) -> None:
    refusal = status_in(state).refusal()
    assert isinstance(refusal, UnavailableError)
    assert isinstance(refusal, EngineDeadError) == (state is EngineState.DEAD)
    assert (refusal.code, refusal.retry_after_s is not None) == (code, comes_back)
    assert refusal.message


async def test_ready_refuses_nobody() -> None:
    assert status_in(EngineState.READY).refusal() is None


# Death --------------------------------------------------------------------------------------

SENSORS: list[tuple[str, Callable[[EngineStatus], None]]] = [
    ("CUDA out of memory", lambda status: status.report_fatal("CUDA out of memory", "Traceback …")),
    ("killed by SIGKILL", lambda status: status.report_exit("killed by SIGKILL")),
    ("the engine has closed its end of the wire", EngineStatus.report_peer_gone),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_best_sensor_within_the_time_names_the_cause(
    order: tuple[int, ...], autojump_clock: MockClock
) -> None:
    status = status_in(EngineState.READY)
    for sensor in order:
        SENSORS[sensor][1](status)
        assert status.state is EngineState.DEAD  # at once, whoever speaks
        assert status.dead.is_set()
        await trio.sleep(SETTLE_S / 4)
    await status.wait_settled()
    assert status.reason == "CUDA out of memory"
    assert status.traceback == "Traceback …"


@pytest.mark.parametrize(("first", "patience_s"), [(1, SETTLE_S), (2, EXIT_S)])
async def test_cause_is_frozen_in_time(
    first: int, patience_s: float, autojump_clock: MockClock
) -> None:
    status = status_in(EngineState.READY)
    reason, report = SENSORS[first]
    report(status)
    since_s = status.since_s
    await trio.sleep(patience_s * 1.01)
    for _, other in SENSORS:
        other(status)
    assert (status.reason, status.traceback, status.since_s) == (reason, "", since_s)
    assert status.death.settled.is_set()


@pytest.mark.parametrize("exit_s", [0.4, 0.98])
async def test_an_exit_after_the_wire_has_its_own_50_ms_for_a_last_word(
    exit_s: float, autojump_clock: MockClock
) -> None:
    status = status_in(EngineState.READY)
    status.report_peer_gone()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(status.wait_settled)
        await trio.sleep(exit_s)
        status.report_exit("exited with status 1")
    assert status.reason == "exited with status 1"
    assert trio.current_time() == pytest.approx(min(exit_s + SETTLE_S, EXIT_S))


async def test_waiting_freezes_the_cause_when_the_time_is_up(autojump_clock: MockClock) -> None:
    status = status_in(EngineState.READY)
    settled_s: list[float] = []

    async def wait() -> None:
        await status.wait_settled()
        settled_s.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.sleep(3)
        status.report_exit("exited with status 1")
    assert settled_s == [3 + SETTLE_S] * 2
    status.report_fatal("too late")
    assert status.reason == "exited with status 1"


@pytest.mark.parametrize(
    "reports",
    [
        [lambda status: status.mark_dead("a gap in the wire")],
        [lambda status: status.report_fatal("a gap in the wire")],
        [
            lambda status: status.report_peer_gone(drained=True),
            lambda status: status.report_exit("a gap in the wire"),
        ],
        [
            lambda status: status.report_exit("a gap in the wire"),
            lambda status: status.report_peer_gone(),
            lambda status: status.report_peer_gone(drained=True),
        ],
    ],
)
async def test_nobody_waits_where_no_report_could_improve_the_cause(
    reports: list[Callable[[EngineStatus], None]], autojump_clock: MockClock
) -> None:
    status = status_in(EngineState.READY)
    for report in reports:
        assert not status.death.settled.is_set()
        report(status)
    assert status.death.settled.is_set()
    await status.wait_settled()
    assert trio.current_time() == status.since_s
    status.report_fatal("something else", "Traceback …")
    assert (status.reason, status.traceback) == ("a gap in the wire", "")


async def test_exit_alone_leaves_time_for_a_last_word_on_the_wire(
    autojump_clock: MockClock,
) -> None:
    status = status_in(EngineState.READY)
    status.report_exit("exited with status 1")
    status.report_peer_gone()  # a send found nobody; the wire may still hold a last word
    assert not status.death.settled.is_set()
    status.report_fatal("scripted failure of step 3")
    assert status.reason == "scripted failure of step 3"


async def test_end_that_was_asked_for_is_no_death() -> None:
    status = status_in(EngineState.READY)
    status.mark_draining()
    status.mark_stopped()
    for _, report in SENSORS:
        report(status)
    assert status.state is EngineState.STOPPED
    assert not status.dead.is_set()
    assert not status.death.settled.is_set()


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.STALLED, EngineState.DRAINING])
async def test_death_is_seen_from_anywhere(state: EngineState) -> None:
    status = status_in(state)
    status.report_exit("killed by SIGKILL")
    assert status.state is EngineState.DEAD
    assert "killed by SIGKILL" in repr(status)
    status.mark_stopped()  # cleanup
    assert status.state is EngineState.DEAD


async def test_nobody_settles_a_death_that_has_not_happened(autojump_clock: MockClock) -> None:
    status = status_in(EngineState.READY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(status.wait_settled)
        await wait_all_tasks_blocked()
        await trio.sleep(10)
        assert not status.death.settled.is_set()
        nursery.cancel_scope.cancel()
