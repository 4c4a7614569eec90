"""A profile starts and stops between any two steps, and its file opens in a viewer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.sim_core import sim_core
from helpers.stepped_engine import PHASES, SteppedEngine
from trioengine.engine_proc import profiling
from trioengine.engine_proc.profiling import Profiler, StepTimeline
from trioengine.errors import InvalidRequestError
from trioengine.protocol import Add, Call, CallResult
from trioengine.sampling_params import SamplingParams


def test_a_profile_under_load_has_every_phase_of_every_step(tmp_path: Path) -> None:
    engine = SteppedEngine(profile_dir=tmp_path / "made")
    engine.send(Add(1, [300] * 5, SamplingParams(max_tokens=10)))
    engine.turn()
    engine.send(Call(1, "start_profile"))
    engine.turn()  # step 2 begins before the profile does, and ends within it
    engine.turn()
    engine.turn()
    engine.send(Call(2, "stop_profile"))
    engine.run_until_idle()
    results = [message for message in engine.history if isinstance(message, CallResult)]
    assert results[0] == CallResult(1)
    path = results[1].result["timeline"]
    assert results[1].result["trace"] is None
    events = json.loads(Path(path).read_bytes())["traceEvents"]
    for step in (3, 4):
        mine = [event for event in events if event["args"]["step"] == step]
        assert tuple(event["name"] for event in mine) == PHASES
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    starts = [event["ts"] for event in events]
    assert starts == sorted(starts)


def test_nothing_is_kept_while_no_profile_runs(tmp_path: Path) -> None:
    timeline = StepTimeline()
    timeline.begin_step(1)
    timeline.lap("schedule")
    timeline.start()
    assert timeline.running
    assert json.loads(timeline.stop(tmp_path).read_bytes())["traceEvents"] == []
    assert not timeline.running


def test_two_profiles_are_two_files(tmp_path: Path) -> None:
    timeline = StepTimeline()
    paths = []
    for _ in range(2):
        timeline.start()
        timeline.lap("execute")
        paths.append(timeline.stop(tmp_path))
    assert len({*paths}) == 2


def test_a_forgotten_profile_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MAX_EVENTS", 5)
    timeline = StepTimeline()
    timeline.start()
    for _ in range(9):
        timeline.lap("execute")
    assert len(json.loads(timeline.stop(tmp_path).read_bytes())["traceEvents"]) == 5


def test_out_of_turn(tmp_path: Path) -> None:
    _, runner = sim_core()
    profiler = Profiler(StepTimeline(), runner, tmp_path)
    with pytest.raises(InvalidRequestError, match="no profile is running"):
        profiler.stop()
    profiler.start()
    with pytest.raises(InvalidRequestError, match="running already"):
        profiler.start()
    assert set(profiler.stop()) == {"timeline", "trace"}


def test_without_a_directory_profiles_are_refused() -> None:
    _, runner = sim_core()
    profiler = Profiler(StepTimeline(), runner, None)
    for method in (profiler.start, profiler.stop):
        with pytest.raises(InvalidRequestError, match="--profile-dir"):
            method()


def test_the_runners_own_profiler_runs_along(tmp_path: Path) -> None:
    _, runner = sim_core()
    told: list[tuple[str, dict[str, object]]] = []

    def call(method: str, args: dict[str, object]) -> object:
        told.append((method, args))
        return "trace.json" if method == "stop_profile" else None

    runner.call = call  # type: ignore[method-assign]
    profiler = Profiler(StepTimeline(), runner, tmp_path)
    profiler.start()
    assert profiler.stop()["trace"] == "trace.json"
    directory = {"profile_dir": str(tmp_path)}
    assert told == [("start_profile", directory), ("stop_profile", directory)]


def test_a_runner_that_cannot_start_leaves_nothing_running(tmp_path: Path) -> None:
    _, runner = sim_core()

    def call(method: str, args: dict[str, object]) -> object:
        raise RuntimeError("no profiler today")

    runner.call = call  # type: ignore[method-assign]
    timeline = StepTimeline()
    with pytest.raises(RuntimeError, match="no profiler today"):
        Profiler(timeline, runner, tmp_path).start()
    assert not timeline.running
