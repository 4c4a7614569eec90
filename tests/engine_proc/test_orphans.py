"""A real engine process whose server is gone ends by itself, whatever it is doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.engine_under_test import PATIENCE_S, Engine, add
from helpers.server_process import wait_until
from trioengine.protocol import Fatal, Hello, Outputs, Progress, Ready

pytestmark = pytest.mark.process


# Orphans ------------------------------------------------------------------------------------------


WITHIN_S = 1.0


def test_an_orphan_ends_while_idle_and_cleans_up() -> None:
    with Engine() as engine:
        engine.until(Ready)
        assert engine.orphan() < WITHIN_S
        assert engine.process.returncode == 1
        assert not engine.directory.exists()


def test_an_orphan_ends_before_anybody_answered_its_hello() -> None:
    with Engine(greet=False) as engine:
        engine.until(Hello)
        assert engine.orphan() < WITHIN_S


def test_an_orphan_ends_while_it_loads() -> None:
    with Engine(engine_args={"hang_on_load": True}) as engine:
        engine.until(Progress)
        assert engine.orphan() < WITHIN_S
        assert not engine.directory.exists()


def test_an_orphan_ends_within_a_step_that_never_does() -> None:
    with Engine(engine_args={"hang_at_step": 3}) as engine:
        engine.until(Ready)
        engine.send(add(1, max_tokens=4000))
        for _ in range(2):
            engine.until(Outputs)
        wait_until(lambda: engine.page.read().step == 3, what="step 3 has begun")
        assert engine.orphan() < WITHIN_S


def test_an_orphan_ends_while_it_decodes() -> None:
    with Engine() as engine:
        engine.until(Ready)
        engine.send(add(1, max_tokens=8000))
        engine.until(Outputs)
        assert engine.orphan() < WITHIN_S


def test_a_long_step_still_beats() -> None:
    with Engine(engine_args={"hang_at_step": 1}) as engine:
        engine.until(Ready)
        engine.send(add(1))
        wait_until(lambda: engine.page.read().phase == "step", what="the step has begun")
        begun_s = engine.page.read().step_started_s
        wait_until(lambda: engine.page.read().last_beat_s > begun_s, what="a beat within the step")


def test_a_pipe_that_nobody_reads_does_not_stop_it() -> None:
    # The traceback that it prints is larger than a pipe.
    with Engine(engine_args={"fail_on_load": "x" * 200_000}) as engine:
        assert len(engine.until(Fatal).cause) > 200_000
        assert engine.wait() == 1


@pytest.mark.parametrize("line", [b"", b"{}\n", b"not json\n"])
def test_a_bad_first_line_is_an_error(line: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trioengine.engine_proc"],
        input=line,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr
