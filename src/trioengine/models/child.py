"""``python -m trioengine.models.child MODEL``: prepare a model in a process of its own.

Standard output has one JSON object a line, ``{"phase": …, "fraction": …}`` while it works (at least
one every 5 s) and at last ``{"model_dir": …}``. The last line on standard error is one sentence
with the cause of a failure; the exit code is that of the server for the same cause: 2 for
configuration, 4 for a checkpoint that does not load.

With ``--lifeline`` the process makes itself the leader of its group, and ends, together with
whatever it started, when its standard input ends: whoever started it is gone, or wants it gone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final, TextIO

from trioengine.exit_codes import ExitCode, judge_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["main"]

REPEAT_S: Final = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the model that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trioengine.models.child")
    parser.add_argument("--lifeline", action="store_true")
    parser.add_argument("model")
    options = parser.parse_args(arguments)
    if options.lifeline:
        os.setpgid(0, 0)
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    _be_quiet()
    with _Reporter(_claim_standard_output()) as reporter:
        try:
            model_dir = _prepare(options.model, reporter.progress)
        except Exception as error:
            return _explain(error)
        reporter.done(model_dir)
    return ExitCode.ASKED


def _prepare(name: str, progress: Callable[[str, float], None]) -> Path:
    from trioengine.models.pipeline import prepare_model
    from trioengine.models.resolve import resolve_model

    return prepare_model(resolve_model(name), progress)


def _explain(error: Exception) -> int:
    code, cause = judge_end(error)
    if code is ExitCode.UNEXPECTED:
        traceback.print_exception(error)
    sys.stderr.write(f"{cause}\n")
    return code


def _end_with_standard_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _claim_standard_output() -> TextIO:
    """Return standard output for ourselves; what libraries print goes to standard error."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def _be_quiet() -> None:
    """Keep bars and advice of libraries out of standard error; the user's own settings win."""
    for variable, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(variable, value)


class _Reporter:
    """Writes progress: each new phase, each new percent, and the last one again every 5 s."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._last: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._repeater = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> _Reporter:
        self._repeater.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._repeater.join()
        self._output.close()

    def progress(self, phase: str, fraction: float) -> None:
        reached = (phase, int(fraction * 100) / 100)
        if reached != self._last:
            self._last = reached
            self._write({"phase": phase, "fraction": reached[1]})

    def done(self, model_dir: Path) -> None:
        self._write({"model_dir": str(model_dir)})

    def _repeat(self) -> None:
        while not self._stopped.wait(REPEAT_S):
            if self._last is not None:
                phase, fraction = self._last
                self._write({"phase": phase, "fraction": fraction})

    def _write(self, line: dict[str, object]) -> None:
        with self._lock:
            self._output.write(json.dumps(line) + "\n")
            self._output.flush()


if __name__ == "__main__":
    sys.exit(main())
