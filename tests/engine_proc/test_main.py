"""A real engine process with the simulated model: handshake, work, signals, its own ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.engine_under_test import Engine, add
from trioengine.outputs import FinishReason
from trioengine.protocol import (
    Abort,
    Accepted,
    Call,
    CallResult,
    Fatal,
    Hello,
    Outputs,
    Progress,
    Ready,
    Shutdown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine for tests that leave it as they found it; about one token a millisecond."""
    with Engine(engine_args={"step_time_ms": 1.0}) as engine:
        engine.until(Ready)
        yield engine


# Work ---------------------------------------------------------------------------------------------


def test_progress_then_ready_with_model_and_limits() -> None:
    with Engine(max_num_seqs=5, engine_args={"load_time_ms": 1.0}) as engine:
        told = engine.receive()
        assert isinstance(told, Progress)
        ready = engine.until(Ready)
        assert ready.model.simulated
        assert ready.limits.max_num_seqs == 5
        engine.send(Shutdown())
        assert engine.wait() == 0
        assert engine.words() == ""


def test_a_request_is_accepted_and_served(shared: Engine) -> None:
    shared.send(add(1, max_tokens=5))
    assert shared.until(Accepted) == Accepted([1])
    output = shared.terminal(1)
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == len(output.text.split()) == 5


def test_an_abort_is_confirmed_and_frees(shared: Engine) -> None:
    shared.send(add(2, max_tokens=4000), add(3, max_tokens=4000))
    shared.until(Outputs)
    shared.send(Abort([2]))
    assert shared.terminal(2).finish_reason is FinishReason.ABORT
    shared.send(Abort([3]))
    while True:
        frame = shared.until(Outputs)
        if any(delta.finish_reason for delta in frame.deltas):
            break
    assert (frame.stats.num_running, frame.stats.num_waiting) == (0, 0)
    assert frame.stats.free_blocks + frame.stats.evictable_blocks == 8192


def test_calls_while_idle_and_while_busy(shared: Engine) -> None:
    shared.send(Call(1, "check_integrity"))
    assert shared.until(CallResult) == CallResult(1)
    shared.send(add(4, max_tokens=4000), Call(2, "nonsense"))
    assert shared.until(CallResult).error == "unknown method 'nonsense'"
    shared.send(Abort([4]))
    assert shared.terminal(4).finish_reason is FinishReason.ABORT


def test_the_page_tells_steps_and_idleness(shared: Engine) -> None:
    before = shared.page.read()
    shared.send(add(5, max_tokens=20))
    shared.terminal(5)
    shared.send(Call(3, "check_integrity"))
    shared.until(CallResult)
    after = shared.page.read()
    assert after.step >= before.step + 20
    assert after.step_started_s > before.step_started_s
    assert 0 <= time.monotonic() - after.last_beat_s < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_servers_signals_are_not_the_engines(shared: Engine, number: signal.Signals) -> None:
    shared.send(add(10 + number, max_tokens=30))
    shared.until(Accepted)
    shared.process.send_signal(number)
    assert shared.terminal(10 + number).finish_reason is FinishReason.LENGTH
    assert shared.process.poll() is None


def test_a_profile_over_the_wire(tmp_path: Path) -> None:
    with Engine(profile_dir=str(tmp_path), engine_args={"step_time_ms": 1.0}) as engine:
        engine.until(Ready)
        engine.send(add(1, max_tokens=4000), Call(1, "start_profile"))
        assert engine.until(CallResult) == CallResult(1)
        engine.until(Outputs)
        engine.send(Call(2, "stop_profile"))
        result = engine.until(CallResult).result
        assert Path(result["timeline"]).stat().st_size > 100
        engine.send(Abort([1]), Shutdown())
        assert engine.wait() == 0


# Ends ---------------------------------------------------------------------------------------------


def test_sighup_ends_it() -> None:
    with Engine() as engine:
        engine.until(Ready)
        engine.process.send_signal(signal.SIGHUP)
        assert engine.wait() == -signal.SIGHUP


def test_shutdown_with_requests_open() -> None:
    with Engine() as engine:
        engine.until(Ready)
        engine.send(add(1, max_tokens=4000), Shutdown())
        assert engine.wait() == 0


@pytest.mark.parametrize(("token", "complaint"), [("a guess", "stranger"), ("", "stranger")])
def test_a_stranger_is_refused(token: str, complaint: str) -> None:
    with Engine(token=token) as engine:
        assert complaint in engine.until(Fatal).cause
        assert engine.wait() == 1


def test_nothing_is_served_before_hello() -> None:
    with Engine(greet=False) as engine:
        engine.send(add(1))
        engine.until(Hello)
        assert engine.until(Fatal).cause == "Add before Hello"
        assert engine.wait() == 1


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"engine_args": {"fail_on_load": "no such weights"}}, "RuntimeError: no such weights"),
        ({"engine_args": {"no_such_thing": 1}}, "engine_args of the simulated engine"),
        ({"backend": "torch"}, "the torch engine needs a checkpoint"),
    ],
)
def test_a_load_that_fails_says_why_everywhere(options: dict[str, Any], cause: str) -> None:
    with Engine(**options) as engine:
        fatal = engine.until(Fatal)
        assert fatal.cause.startswith(cause)
        assert engine.wait() == 1
        assert cause.removeprefix("RuntimeError: ") in engine.words().splitlines()[-1]


def test_a_step_that_fails_is_the_last_word_after_all_outputs() -> None:
    with Engine(engine_args={"fail_at_step": 50}) as engine:
        engine.until(Ready)
        engine.send(add(1, max_tokens=4000))
        assert [engine.until(Outputs).step for _ in range(49)] == list(range(1, 50))
        fatal = engine.until(Fatal)
        assert fatal.cause == "RuntimeError: scripted failure of step 50"
        assert "sim_runner.py" in fatal.traceback
        assert engine.wait() == 1


def test_a_gap_in_the_commands_is_fatal() -> None:
    with Engine() as engine:
        engine.until(Ready)
        engine._encoder.encode(Abort([1]))  # encoded and never sent
        engine.send(Abort([2]))
        assert engine.until(Fatal).cause == "frame 2 where 1 was due"
        assert engine.wait() == 1


def test_exits_as_scripted() -> None:
    with Engine(engine_args={"exit_at_step": 2}) as engine:
        engine.until(Ready)
        engine.send(add(1))
        assert engine.wait() == 70
    with Engine(engine_args={"exit_on_load": 7}) as engine:
        assert engine.wait() == 7
