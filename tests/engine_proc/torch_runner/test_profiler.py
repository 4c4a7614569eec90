from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.engine_proc.torch_runner.profiler import TorchProfiler

pytestmark = pytest.mark.model


def make_profiler() -> TorchProfiler:
    pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.profiler import TorchProfiler

    return TorchProfiler()


def test_a_trace_names_what_torch_ran_in_between(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    profiler = make_profiler()
    torch.ones(3).sin()
    profiler.start(tmp_path / "new")
    torch.ones(3).cos()
    path = profiler.stop()
    torch.ones(3).tan()
    with open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::cos" in names
    assert not names & {"aten::sin", "aten::tan"}


def test_profiles_follow_each_other_in_files_of_their_own(tmp_path: Path) -> None:
    profiler = make_profiler()
    paths = set()
    for _ in range(3):
        profiler.start(tmp_path)
        paths.add(profiler.stop())
    assert len(paths) == 3


def test_starting_twice_and_stopping_nothing_are_refused(tmp_path: Path) -> None:
    profiler = make_profiler()
    with pytest.raises(InvalidRequestError, match="no profile is running"):
        profiler.stop()
    profiler.start(tmp_path)
    with pytest.raises(InvalidRequestError, match="running already"):
        profiler.start(tmp_path)
    profiler.stop()


def test_a_trace_that_cannot_be_written_ends_the_profile_all_the_same(tmp_path: Path) -> None:
    profiler = make_profiler()
    (tmp_path / "file").write_text("in the way")
    profiler.start(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        profiler.stop()
    profiler.start(tmp_path)
    profiler.stop()


def test_a_discarded_profile_leaves_nothing(tmp_path: Path) -> None:
    profiler = make_profiler()
    profiler.discard()
    profiler.start(tmp_path)
    profiler.discard()
    assert not list(tmp_path.iterdir())
    profiler.start(tmp_path)
    profiler.stop()
