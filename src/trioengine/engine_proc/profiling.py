"""A timeline of the engine's steps, in the format that Chrome's and Perfetto's viewers read.

The core and the loop call ``lap`` at every boundary of a step whether a profile runs or not; with
none running that is one comparison. A profile may start and stop between any two steps, under load.

Source: "Trace Event Format", Google, 2016 (complete events, ``"ph": "X"``, microseconds).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from trioengine.engine_proc.runner import ModelRunner

__all__ = ["Profiler", "StepTimeline"]

MAX_EVENTS: Final = 500_000  # ≈ 70,000 steps, 60 MB: a profile that was forgotten stays bounded


class StepTimeline:
    """Records how long each phase of each step took, while a profile runs."""

    def __init__(self) -> None:
        self._events: list[tuple[str, int, int, int]] | None = None
        self._step = 0
        self._last_ns = 0
        self._num_profiles = 0

    @property
    def running(self) -> bool:
        """True between ``start`` and ``stop``."""
        return self._events is not None

    def start(self) -> None:
        """Begin to record.

        Raises:
            InvalidRequestError: A profile runs already.
        """
        if self._events is not None:
            raise InvalidRequestError("a profile is running already")
        self._events = []
        self._last_ns = time.perf_counter_ns()

    def discard(self) -> None:
        """Forget what was recorded and stop recording."""
        self._events = None

    def begin_step(self, number: int) -> None:
        """Say that step ``number`` begins now; what came before it belongs to no phase."""
        if self._events is not None:
            self._step = number
            self._last_ns = time.perf_counter_ns()

    def lap(self, phase: str) -> None:
        """Say that ``phase`` ends now; it began where the one before it ended."""
        if self._events is not None:
            now_ns = time.perf_counter_ns()
            if len(self._events) < MAX_EVENTS:
                self._events.append((phase, self._step, self._last_ns, now_ns))
            self._last_ns = now_ns

    def stop(self, directory: Path) -> Path:
        """Write what was recorded into ``directory`` and return the file.

        Raises:
            InvalidRequestError: No profile runs.
            OSError: The file cannot be written; the recording is over all the same.
        """
        if self._events is None:
            raise InvalidRequestError("no profile is running")
        events, self._events = self._events, None
        self._num_profiles += 1
        path = directory / f"steps-{os.getpid()}-{self._num_profiles}.json"
        path.write_bytes(msgspec.json.encode(_trace(events)))
        return path


def _trace(events: list[tuple[str, int, int, int]]) -> dict[str, Any]:
    pid = os.getpid()
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "name": phase,
                "ph": "X",
                "pid": pid,
                "tid": 0,
                "ts": begin_ns / 1000,
                "dur": (end_ns - begin_ns) / 1000,
                "args": {"step": step},
            }
            for phase, step, begin_ns, end_ns in events
        ],
    }


class Profiler:
    """Start and stop the timeline together with the runner's own profiler, if it has one."""

    def __init__(self, timeline: StepTimeline, runner: ModelRunner, directory: Path | None) -> None:
        self._timeline = timeline
        self._runner = runner
        self._directory = directory

    def start(self) -> None:
        """Begin to profile.

        Raises:
            InvalidRequestError: No directory is configured, or a profile runs already.
            OSError: The directory cannot be made.
        """
        directory = self._require_directory()
        directory.mkdir(parents=True, exist_ok=True)
        self._timeline.start()
        try:
            self._tell_runner("start_profile", directory)
        except BaseException:
            self._timeline.discard()
            raise

    def stop(self) -> dict[str, object]:
        """End the profile; return its files as ``{"timeline": …, "trace": … or None}``.

        Raises:
            InvalidRequestError: No profile runs.
            OSError: A file cannot be written.
        """
        directory = self._require_directory()
        timeline = self._timeline.stop(directory)
        return {
            "timeline": str(timeline),
            "trace": self._tell_runner("stop_profile", directory),
        }

    def _require_directory(self) -> Path:
        if self._directory is None:
            raise InvalidRequestError("profiling needs --profile-dir")
        return self._directory

    def _tell_runner(self, method: str, directory: Path) -> object:
        try:
            return self._runner.call(method, {"profile_dir": str(directory)})
        except KeyError:  # the runner has no profiler of its own
            return None
