"""What an end means to whoever started us: exit codes, and the one sentence that goes last."""

from __future__ import annotations

import enum

from trioengine.errors import ConfigError, EngineDeadError, EngineStartError, TrioEngineError

__all__ = ["ExitCode", "judge_end"]


class ExitCode(enum.IntEnum):
    """Exit codes of ``trioengine``. Distinct, so that a service manager can tell them apart."""

    ASKED = 0  # to stop: also while starting, and after a second signal
    UNEXPECTED = 1  # an error in the server
    USAGE = 2  # a flag, a file, a model that is not there, a port that is taken
    ENGINE_DIED = 3  # while serving or draining
    ENGINE_NOT_STARTED = 4  # it failed, or was not ready in time


def judge_end(error: BaseException) -> tuple[ExitCode, str]:
    """Return the exit code that ``error`` deserves, and its cause as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = _gravest(error.exceptions)
    if isinstance(error, EngineStartError):
        return ExitCode.ENGINE_NOT_STARTED, _one_line(error.message)
    if isinstance(error, EngineDeadError):
        return ExitCode.ENGINE_DIED, _one_line(error.message)
    if isinstance(error, ConfigError):
        return ExitCode.USAGE, _one_line(error.message)
    if isinstance(error, TrioEngineError):
        return ExitCode.UNEXPECTED, _one_line(error.message)
    return ExitCode.UNEXPECTED, _one_line(f"unexpected {type(error).__name__}: {error}")


def _gravest(errors: tuple[BaseException, ...]) -> BaseException:
    """Return the one to report: one that we raised on purpose explains the others."""
    return next((error for error in errors if isinstance(error, TrioEngineError)), errors[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())
