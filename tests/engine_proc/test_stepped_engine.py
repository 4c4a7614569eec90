"""The helper itself: a transport that loses nothing, and an engine that moves only when told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers.stepped_engine import PHASES, SteppedEngine
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.protocol import (
    Abort,
    Accepted,
    Add,
    EngineMessage,
    Fatal,
    Hello,
    Outputs,
    Progress,
    Ready,
    Shutdown,
)
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio.testing import MockClock


def add(request_id: int, max_tokens: int = 3) -> Add:
    return Add(request_id, [300 + request_id] * 5, SamplingParams(max_tokens=max_tokens))


async def test_hello_and_ready_come_first() -> None:
    engine = SteppedEngine()
    hello, ready = await engine.receive()
    assert isinstance(hello, Hello)
    assert isinstance(ready, Ready)


async def test_a_starting_engine_reports_progress_and_serves_later() -> None:
    engine = SteppedEngine(starting=True)
    engine.report_progress("load", 0.5)
    engine.send(add(1))
    engine.turn()
    assert [type(message) for message in await engine.receive()] == [Hello, Progress]
    engine.become_ready()
    engine.turn()
    assert [type(message) for message in await engine.receive()] == [Ready, Accepted, Outputs]


async def test_nothing_moves_by_itself() -> None:
    engine = SteppedEngine()
    await engine.receive()
    engine.send(add(1))
    with trio.move_on_after(0) as scope:
        await engine.receive()
    assert scope.cancelled_caught
    assert engine.live == frozenset()
    engine.turn()
    assert engine.live == {1}
    assert engine.page.phase == "step 1"
    assert engine.run_until_idle() == 2
    assert engine.page.phase == "idle"


async def test_it_runs_freely_in_mock_time(autojump_clock: MockClock) -> None:
    engine = SteppedEngine()
    begin_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run_freely, 2.0)
        engine.send(add(1, max_tokens=10))
        received: list[EngineMessage] = []
        while engine.core.stats().generation_tokens != 10:
            received += await engine.receive()
        assert trio.current_time() - begin_s == pytest.approx(18.0)
        engine.send(Shutdown())
    assert engine.dead


async def test_a_cancelled_receive_loses_nothing() -> None:
    engine = SteppedEngine()
    async with trio.open_nursery() as nursery:
        await engine.receive()

        async def cancelled() -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_then_send, scope)
                await engine.receive()

        async def cancel_then_send(scope: trio.CancelScope) -> None:
            await wait_all_tasks_blocked()
            engine.report_progress("load", 0.1)
            scope.cancel()

        await cancelled()
    assert await engine.receive() == [Progress("load", 0.1)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_at_any_boundary_is_the_end(phase: str) -> None:
    engine = SteppedEngine()
    engine.send(add(1))
    engine.at(phase, engine.crash)
    engine.turn()
    assert engine.dead
    said = [type(message) for message in engine.history[2:]]
    assert said == ([Accepted, Outputs] if phase == "send" else [Accepted])
    with pytest.raises(BrokenPipeError):
        engine.send(Abort([1]))
    engine.turn()
    assert len(engine.history) == 2 + len(said)


async def test_what_a_dead_engine_had_sent_is_still_received() -> None:
    engine = SteppedEngine(SimScript(fail_at_step=1), send_error=lambda: ConnectionError("gone"))
    engine.send(add(1))
    engine.turn()
    assert isinstance((await engine.receive())[-1], Fatal)
    with pytest.raises(ConnectionError):
        engine.send(add(2))


def test_an_unknown_phase_is_a_mistake_of_the_test() -> None:
    with pytest.raises(ValueError, match="no phase 'lunch'"):
        SteppedEngine().at("lunch", lambda: None)


def test_shut_down() -> None:
    engine = SteppedEngine()
    engine.send(add(1))
    engine.shut_down()
    assert engine.dead
