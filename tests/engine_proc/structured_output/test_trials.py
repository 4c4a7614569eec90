"""Specifications that would keep a compiler busy, or kill it, and the process they do it to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.engine_proc.structured_output.trials import TRIAL_ARGV, Trials
from trioengine.errors import InternalError, InvalidRequestError
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def test_without_a_process_nothing_is_compiled(make: Any) -> None:
    with pytest.raises(InternalError):
        make("false")(GOOD)


def test_a_broken_compiler_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = make(sys.executable, "-c", ANSWERS_ONCE + 'print(\'{"fault": "broken"}\')')
    with pytest.raises(InternalError, match="broken"):
        trials(GOOD)
