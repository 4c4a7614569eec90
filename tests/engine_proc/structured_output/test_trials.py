"""Specifications that would keep a compiler busy, or kill it, and the process they do it to."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from helpers.server_process import wait_until
from trioengine.engine_proc.structured_output.trials import TRIAL_ARGV, Trials
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from helpers.grammars import Judge
    from trioengine.engine_proc.structured_output.trials import _Child

pytestmark = [pytest.mark.process, pytest.mark.slow]

GOOD = StructuredOutput("json", '{"type": "integer"}', param="p")
BAD = StructuredOutput("json", '{"uniqueItems": true}', param="p")
# Whether any text has all of these in it is a question of 2 ** 100 states.
ENDLESS = StructuredOutput(
    "json", json.dumps({"allOf": [{"pattern": f"a{i}.*b"} for i in range(100)]}), param="p"
)
ANSWERS_ONCE = """
import sys
sys.stdin.readline()
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def make(judge: Judge) -> Iterator[Any]:
    made: list[Trials] = []

    def make(*argv: str, max_seconds: float = 30.0) -> Trials:
        how: Sequence[str] = argv or TRIAL_ARGV
        made.append(Trials(judge.compile, argv=how, max_seconds=max_seconds))
        return made[-1]

    yield make
    for trials in made:
        trials.close()


def only_child(trials: Trials) -> _Child:
    [child] = trials._idle
    return child


def test_one_process_tries_what_comes(make: Any, judge: Judge) -> None:
    trials = make()
    assert judge.allows(trials(GOOD), 5)
    child = only_child(trials)
    with pytest.raises(InvalidRequestError, match="uniqueItems") as refusal:
        trials(BAD)
    assert refusal.value.param == "p"
    with pytest.raises(InvalidRequestError) as here:
        judge.compile(BAD)
    assert refusal.value.message == here.value.message
    trials(GOOD)
    assert only_child(trials) is child
    trials.close()
    assert child._process.returncode == -9
    trials.close()


def test_what_takes_too_long_is_ended(make: Any) -> None:
    trials = make(max_seconds=2.0)
    trials(GOOD)
    child = only_child(trials)
    with pytest.raises(InvalidRequestError, match=r"more than 2 s") as refusal:
        trials(ENDLESS)
    assert refusal.value.param == "p"
    assert child._process.returncode == -9
    trials(GOOD)
    assert only_child(trials) is not child


def test_a_process_leaves_with_its_parent_in_the_middle_of_its_work(make: Any) -> None:
    trials = make()
    trials(GOOD)
    child = only_child(trials)
    child._say(json.dumps({"kind": "json", "spec": ENDLESS.spec}).encode())
    with pytest.raises(subprocess.TimeoutExpired):
        child._process.wait(timeout=0.3)
    child._stdin.close()
    assert child._process.wait(timeout=10) == 0


def test_what_kills_the_process_is_refused(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trials = make(sys.executable, "-c", ANSWERS_ONCE)
    with pytest.raises(InvalidRequestError, match="too much memory") as refusal:
        trials(GOOD)
    assert refusal.value.param == "p"
    assert "died" in caplog.text


def test_a_process_that_somebody_ended_while_idle_is_nobodys_fault(make: Any, judge: Judge) -> None:
    trials = make()
    trials(GOOD)
    ended = only_child(trials)
    ended._process.kill()
    ended._process.wait()
    assert judge.allows(trials(GOOD), 5)
    assert only_child(trials) is not ended


@pytest.fixture
def starts_badly(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Return what is ended from outside so many times, and is a proper process then."""

    def starts_badly(how: str, times: int) -> tuple[str, ...]:
        count = tmp_path / "count"
        code = ENDED_BY_SOMEBODY.format(count=str(count), times=times, how=how)
        return (sys.executable, "-c", code)

    return starts_badly


ENDED_BY_SOMEBODY = """
import os, pathlib, signal, sys
count = pathlib.Path({count!r})
nth = int(count.read_text()) if count.exists() else 0
count.write_text(str(nth + 1))
if nth < {times}:
    if {how!r} == "working":
        sys.stdin.readline()
        print(flush=True)
        sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
from trioengine.engine_proc.structured_output.trial_process import main
main()
"""


@pytest.mark.parametrize("how", ["starting", "working"])
def test_a_process_that_somebody_ends_gets_one_successor(
    how: str, make: Any, judge: Judge, starts_badly: Callable[..., tuple[str, ...]]
) -> None:
    trials = make(*starts_badly(how, 1))
    assert judge.allows(trials(GOOD), 5)
    assert only_child(trials).lives


@pytest.mark.parametrize(
    ("how", "error"), [("starting", InternalError), ("working", InvalidRequestError)]
)
def test_what_is_ended_twice_is_not_tried_again(
    how: str,
    error: type[Exception],
    make: Any,
    judge: Judge,
    starts_badly: Callable[..., tuple[str, ...]],
) -> None:
    trials = make(*starts_badly(how, 2))
    with pytest.raises(error):
        trials(GOOD)
    assert trials._idle == []
    assert judge.allows(trials(GOOD), 5)  # the third


def wait_idle(trials: Trials, *, other_than: _Child | None = None) -> _Child:
    def idle() -> _Child | None:
        return next((child for child in trials._idle if child is not other_than), None)

    return wait_until(idle, what="an idle process")


def test_the_first_does_not_wait_for_what_was_started_ahead(make: Any, judge: Judge) -> None:
    trials = make()
    trials.start_ahead(0.0)
    child = wait_idle(trials)
    assert judge.allows(trials(GOOD), 5)
    assert only_child(trials) is child


def test_one_that_comes_meanwhile_waits_for_what_is_being_started(
    make: Any, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = make()
    starting, go_on = threading.Event(), threading.Event()
    description = judge.compile.description

    def slow() -> bytes:
        starting.set()
        go_on.wait()
        return description()

    monkeypatch.setattr(judge.compile, "description", slow)
    trials.start_ahead(0.0)
    starting.wait()
    starting.clear()
    asking = threading.Thread(target=trials, args=(GOOD,))
    asking.start()
    assert not starting.wait(0.2)  # it starts none of its own
    go_on.set()
    asking.join()
    assert only_child(trials).lives


def test_what_was_killed_is_replaced_before_the_next_comes(make: Any) -> None:
    trials = make(max_seconds=2.0)
    trials.start_ahead(0.0)
    child = wait_idle(trials)
    with pytest.raises(InvalidRequestError, match=r"more than 2 s"):
        trials(ENDLESS)
    assert wait_idle(trials, other_than=child).lives


def test_nothing_is_started_ahead_of_an_end(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trials = make("false")
    trials.start_ahead(60.0)
    timer = trials._timer
    trials.close()
    timer.join(10.0)  # it was called off
    assert not timer.is_alive()
    broken = make("false")
    broken.start_ahead(0.0)
    wait_until(lambda: "could be started ahead" in caplog.text, what="a word in the log")


def test_without_a_process_nothing_is_compiled(make: Any) -> None:
    with pytest.raises(InternalError):
        make("false")(GOOD)


def test_a_broken_compiler_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = make(sys.executable, "-c", ANSWERS_ONCE + 'print(\'{"fault": "broken"}\')')
    with pytest.raises(InternalError, match="broken"):
        trials(GOOD)
