"""One turn of the loop: what goes out, in which order, and aborts at every boundary of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers.sim_core import sim_core
from helpers.stepped_engine import PHASES, SteppedEngine
from trioengine.engine_proc.loop import EngineLoop, fatal_from
from trioengine.engine_proc.sim_runner import SimScript
from trioengine.errors import ConfigError
from trioengine.outputs import FinishReason, RequestOutput
from trioengine.protocol import (
    Abort,
    Accepted,
    Add,
    Call,
    CallResult,
    EngineMessage,
    Fatal,
    Outputs,
    Shutdown,
)
from trioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_BLOCKS = 256


def add(request_id: int, max_tokens: int = 3, num_prompt_tokens: int = 5) -> Add:
    return Add(
        request_id, [300 + request_id] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens)
    )


def deltas(messages: Iterable[EngineMessage], request_id: int) -> list[RequestOutput]:
    frames = [message for message in messages if isinstance(message, Outputs)]
    return [d for frame in frames for d in frame.deltas if d.request_id == request_id]


def reasons(engine: SteppedEngine, request_id: int) -> list[FinishReason]:
    found = [delta.finish_reason for delta in deltas(engine.history, request_id)]
    return [reason for reason in found if reason is not None]


def news(engine: SteppedEngine) -> list[str]:
    """Return the kinds of message since the last call, and forget them."""
    kinds = [type(message).__name__ for message in engine.history]
    engine.history.clear()
    return kinds


@pytest.fixture
def engine() -> SteppedEngine:
    engine = SteppedEngine()
    engine.history.clear()
    return engine


# Frames --------------------------------------------------------------------------------------


def test_accepted_comes_first_then_one_frame_a_step(engine: SteppedEngine) -> None:
    engine.send(add(1))
    engine.send(add(2))
    engine.turn()
    assert engine.history[0] == Accepted([1, 2])
    assert news(engine) == ["Accepted", "Outputs"]
    engine.turn()
    assert news(engine) == ["Outputs"]


def test_steps_are_numbered_and_empty_ones_are_told_too() -> None:
    engine = SteppedEngine(max_num_batched_tokens=16)
    engine.send(add(1, num_prompt_tokens=40))
    engine.run_until_idle()
    frames = [message for message in engine.history if isinstance(message, Outputs)]
    assert [frame.step for frame in frames] == [1, 2, 3, 4, 5]
    assert [len(frame.deltas) for frame in frames] == [0, 0, 1, 1, 1]


def test_a_refusal_is_told_without_a_step_and_without_accepted(engine: SteppedEngine) -> None:
    engine.send(add(1, num_prompt_tokens=5000))
    engine.turn()
    assert news(engine) == ["Outputs"]
    assert engine.loop.step == 0


def test_an_abort_is_confirmed_without_a_step(engine: SteppedEngine) -> None:
    engine.send(add(1))
    engine.send(Abort([1]))
    engine.turn()
    assert news(engine) == ["Accepted", "Outputs"]
    assert engine.loop.step == 0
    assert engine.free_blocks == NUM_BLOCKS


def test_an_abort_is_confirmed_before_the_step_of_the_others(engine: SteppedEngine) -> None:
    engine.send(add(1, 9))
    engine.send(add(2, 9))
    engine.turn()
    news(engine)
    engine.send(Abort([1]))
    engine.turn()
    first, second = engine.history
    assert isinstance(first, Outputs)
    assert isinstance(second, Outputs)
    assert [(d.request_id, d.finish_reason) for d in first.deltas] == [(1, FinishReason.ABORT)]
    assert [d.request_id for d in second.deltas] == [2]
    assert first.step == second.step - 1


def test_an_abort_of_nobody_gets_no_answer(engine: SteppedEngine) -> None:
    engine.send(Abort([7]))
    engine.turn()
    assert news(engine) == []
    assert engine.core.stats().aborts_ignored == 1


def test_stats_ride_on_every_frame(engine: SteppedEngine) -> None:
    engine.send(add(1, 1))
    engine.run_until_idle()
    frame = engine.history[-1]
    assert isinstance(frame, Outputs)
    assert (frame.stats.num_running, frame.stats.generation_tokens) == (0, 1)
    assert frame.stats.free_blocks == NUM_BLOCKS


# Aborts at every boundary of the step on which the request finishes (B13) -------------------------


def engine_before_the_last_step() -> SteppedEngine:
    engine = SteppedEngine()
    engine.send(add(1, max_tokens=2))
    engine.send(add(2, max_tokens=6))
    engine.turn()
    return engine


@pytest.mark.parametrize("phase", PHASES)
def test_abort_racing_finish(phase: str) -> None:
    engine = engine_before_the_last_step()
    ignored_before = engine.core.stats().aborts_ignored
    engine.at(phase, lambda: engine.send(Abort([1])))
    engine.turn()
    in_time = phase in PHASES[: PHASES.index("poll aborts")]
    assert reasons(engine, 1) == [FinishReason.ABORT if in_time else FinishReason.LENGTH]
    assert engine.live == {2}
    # Freed already: two requests of one block each, and one is left.
    assert engine.free_blocks == NUM_BLOCKS - 1
    engine.run_until_idle()
    assert engine.core.stats().aborts_ignored - ignored_before == (0 if in_time else 1)
    assert len(reasons(engine, 1)) == len(reasons(engine, 2)) == 1
    assert sum(len(d.token_ids) for d in deltas(engine.history, 2)) == 6
    assert engine.free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("phase", PHASES)
def test_abort_at_every_boundary_of_a_prefill_chunk(phase: str) -> None:
    engine = SteppedEngine(max_num_batched_tokens=32)
    engine.send(add(1, num_prompt_tokens=100))
    engine.at(phase, lambda: engine.send(Abort([1])))
    engine.turn()
    # One that came too late for this step is confirmed by the next turn, before any other step.
    if reasons(engine, 1) == []:
        engine.turn()
        assert engine.loop.step == 1
    assert reasons(engine, 1) == [FinishReason.ABORT]
    assert (engine.live, engine.free_blocks) == (frozenset(), NUM_BLOCKS)


@pytest.mark.parametrize("phase", PHASES)
def test_everybody_aborted_twice_at_every_boundary(phase: str) -> None:
    engine = engine_before_the_last_step()
    for again in (phase, "send"):
        engine.at(again, lambda: engine.send(Abort([1, 2])))
    engine.run_until_idle()
    assert len(reasons(engine, 1)) == len(reasons(engine, 2)) == 1
    assert engine.free_blocks == NUM_BLOCKS


# What arrives within a step ----------------------------------------------------------------------


def test_commands_that_arrive_within_a_step_keep_their_order(engine: SteppedEngine) -> None:
    engine.send(add(1, 2))

    def flood() -> None:
        engine.send(Call(1, "check_integrity"))
        engine.send(add(2, 1))
        engine.send(Call(2, "nonsense"))
        engine.send(add(3, 1))

    engine.at("execute", flood)
    engine.turn()
    assert news(engine) == ["Accepted", "Outputs"]
    engine.turn()
    kinds = [message for message in engine.history if not isinstance(message, Outputs)]
    assert kinds[:3] == [
        CallResult(1),
        Accepted([2]),
        CallResult(2, error="unknown method 'nonsense'", refused=True),
    ]
    assert kinds[3] == Accepted([3])


def test_an_abort_never_overtakes_its_own_add(engine: SteppedEngine) -> None:
    engine.send(add(1, 5))

    def come_and_go() -> None:
        engine.send(add(2, 5))
        engine.send(Abort([2, 1]))

    engine.at("execute", come_and_go)
    engine.turn()
    assert reasons(engine, 1) == [FinishReason.ABORT]
    assert reasons(engine, 2) == []
    engine.run_until_idle()
    assert reasons(engine, 2) == [FinishReason.ABORT]
    assert deltas(engine.history, 2)[0].token_ids == []
    assert engine.core.stats().aborts_ignored == 0


def test_a_shutdown_within_a_step_ends_after_it(engine: SteppedEngine) -> None:
    engine.send(add(1, 5))
    engine.at("execute", lambda: engine.send(Shutdown()))
    engine.turn()
    assert news(engine) == ["Accepted", "Outputs"]
    engine.turn()
    assert engine.dead
    assert news(engine) == []


def test_nothing_is_read_after_shutdown(engine: SteppedEngine) -> None:
    engine.send(Shutdown())
    engine.send(add(1))
    engine.turn()
    assert engine.dead
    assert news(engine) == []


# Calls and last words ------------------------------------------------------------------------


def test_a_failing_call_tells_its_caller_and_nobody_else(engine: SteppedEngine) -> None:
    engine.send(add(1, 2))
    engine.send(Call(9, "start_profile"))
    engine.run_until_idle()
    assert CallResult(9, error="profiling needs --profile-dir", refused=True) in engine.history
    assert reasons(engine, 1) == [FinishReason.LENGTH]


def test_calls_are_answered_while_idle(engine: SteppedEngine) -> None:
    engine.send(Call(1, "reset_prefix_cache"))
    engine.turn()
    assert engine.history == [CallResult(1, 0)]


def test_a_failing_step_is_the_last_word() -> None:
    engine = SteppedEngine(SimScript(fail_at_step=2))
    engine.send(add(1, 9))
    engine.turn()
    engine.turn()
    last = engine.history[-1]
    assert isinstance(last, Fatal)
    assert last.cause == "RuntimeError: scripted failure of step 2"
    assert "in execute" in last.traceback
    assert engine.dead


def test_a_second_add_of_an_id_is_fatal(engine: SteppedEngine) -> None:
    engine.send(add(1, 9))
    engine.send(add(1, 9))
    engine.turn()
    last = engine.history[-1]
    assert isinstance(last, Fatal)
    assert last.cause == "request id 1 was added twice"


def test_the_cause_of_our_own_errors_is_their_sentence() -> None:
    assert fatal_from(ConfigError("no such flag")).cause == "no such flag"
    assert fatal_from(MemoryError()).cause == "MemoryError"


# The loop around the turns -----------------------------------------------------------------------


class Scripted:
    """A channel that hands out one list of messages a drain, and counts its waits."""

    def __init__(self, *batches: list[object]) -> None:
        self.batches = list(batches)
        self.waits = 0
        self.sent: list[EngineMessage] = []

    def drain(self) -> list:  # type: ignore[type-arg]
        return self.batches.pop(0) if self.batches else [Shutdown()]

    def wake(self) -> None:
        """Nobody sleeps here."""

    def wait(self) -> None:
        self.waits += 1

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)


class Page:
    def __init__(self) -> None:
        self.said: list[object] = []

    def begin_step(self, number: int) -> None:
        self.said.append(number)

    def idle(self) -> None:
        self.said.append("idle")


def test_it_sleeps_only_without_work_and_says_so_on_the_page() -> None:
    core, _ = sim_core()
    # Each step drains twice: before it and within it.
    channel, page = Scripted([], [add(1, 2)], [], [], [], []), Page()
    EngineLoop(core, channel, page).run()
    assert page.said == ["idle", "idle", 1, 2, "idle", "idle"]
    assert channel.waits == 4
    assert reasons_of(channel.sent) == [FinishReason.LENGTH]


def reasons_of(messages: list[EngineMessage]) -> list[FinishReason]:
    found = [delta.finish_reason for delta in deltas(messages, 1)]
    return [reason for reason in found if reason is not None]
