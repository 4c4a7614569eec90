"""torch's own profiler, started and stopped between any two steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch.profiler import profile

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """Writes one Chrome trace per profile."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._directory = Path()
        self._num_profiles = 0

    def start(self, directory: Path) -> None:
        """Begin to record operators (and kernels on CUDA).

        Raises:
            InvalidRequestError: A profile runs already.
        """
        from torch.profiler import ProfilerActivity, profile

        if self._profile is not None:
            raise InvalidRequestError("a profile is running already")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._directory = directory
        self._profile.start()

    def stop(self) -> str:
        """End the profile and return the path of its trace.

        Raises:
            InvalidRequestError: No profile runs.
            OSError: The trace cannot be written; the profile is over all the same.
        """
        if self._profile is None:
            raise InvalidRequestError("no profile is running")
        running, self._profile = self._profile, None
        running.stop()
        self._num_profiles += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"torch-{os.getpid()}-{self._num_profiles}.json"
        running.export_chrome_trace(str(path))
        return str(path)

    def discard(self) -> None:
        """End a profile that nobody stopped, without a trace."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
