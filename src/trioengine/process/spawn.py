"""Start the engine process, as early and as cheaply as can be: nothing here needs Trio.

The command line spawns before it imports HTTP and Trio, so that the engine's own imports run
beside the server's. The child gets its configuration as line 1 of its standard input (never in
``argv``, which every user of the machine can read); what follows is the *lifeline*: end of file
there means that the parent is gone, however it went. ``PR_SET_PDEATHSIG`` is no substitute: it
follows the thread that forked, not the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.config import EngineConfig, EngineOptions
from trioengine.errors import ConfigError
from trioengine.heartbeat import HeartbeatPage
from trioengine.process.runtime_dir import RuntimeDir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ENGINE_ARGV", "SpawnedEngine", "spawn_engine"]

# -P: what lies in the user's working directory is not ours to import.
ENGINE_ARGV: Final = (sys.executable, "-P", "-m", "trioengine.engine_proc")
MAX_CONFIG_BYTES: Final = 60_000  # fits into an empty pipe: writing it never waits
REAP_S: Final = 5.0
SECRETS: Final = frozenset({"TRIOENGINE_API_KEY"})  # not the engine's business


class SpawnedEngine:
    """A process, its directory, and our ends of its pipes.

    Attributes:
        config: What it was told.
        output_descriptor: Read end of its stdout and stderr, non-blocking; ours to close.
    """

    def __init__(
        self,
        config: EngineConfig,
        process: subprocess.Popen[bytes],
        runtime_dir: RuntimeDir,
        output_descriptor: int,
    ) -> None:
        self.config = config
        self.process = process
        self.output_descriptor = output_descriptor
        self._runtime_dir = runtime_dir

    def cut_lifeline(self) -> None:
        """Close its standard input: it exits at once. Idempotent."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def discard(self) -> None:
        """Kill it if it lives, reap it and remove its directory. Idempotent; keeps the pipe."""
        self.cut_lifeline()
        if self.process.poll() is None:
            self.process.kill()
            # Longer only where the kernel itself is stuck; a zombie is the lesser evil then.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=REAP_S)
        self._runtime_dir.remove()


def spawn_engine(
    options: EngineOptions,
    *,
    model_dir: Path | None,
    model_name: str,
    argv: Sequence[str] = ENGINE_ARGV,
    base_dir: Path | None = None,
) -> SpawnedEngine:
    """Start one incarnation.

    Its process group is its own, so that a terminal's Ctrl-C does not reach it.

    Args:
        options: The user's choices.
        model_dir: Converted checkpoint, ``None`` for the simulated engine.
        model_name: Name for people.
        argv: What to run; tests run other things.
        base_dir: Where to make the runtime directory (see ``RuntimeDir.create``).

    Raises:
        ConfigError: No place for sockets, or an absurdly large configuration.
        OSError: The process could not be started.
    """
    runtime_dir = RuntimeDir.create(base_dir)
    try:
        config = _configure(options, model_dir, model_name, runtime_dir.path)
        line = msgspec.json.encode(config) + b"\n"
        if len(line) > MAX_CONFIG_BYTES:
            raise ConfigError(f"--engine-args is too large: {len(line)} bytes")
        HeartbeatPage.create(runtime_dir.path / "heartbeat")
        process, output_descriptor = _start(argv, line)
    except BaseException:
        runtime_dir.remove()
        raise
    return SpawnedEngine(config, process, runtime_dir, output_descriptor)


def _configure(
    options: EngineOptions, model_dir: Path | None, model_name: str, directory: Path
) -> EngineConfig:
    return EngineConfig(
        options=options,
        model_dir=None if model_dir is None else str(model_dir),
        model_name=model_name,
        commands_address=f"ipc://{directory}/commands",
        outputs_address=f"ipc://{directory}/outputs",
        token=secrets.token_hex(16),
        heartbeat_path=str(directory / "heartbeat"),
        runtime_dir=str(directory),
    )


def _start(argv: Sequence[str], first_line: bytes) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``argv`` with one captured pipe for both outputs; return it and our end."""
    ours, theirs = os.pipe()
    # Non-blocking on the child's side: a line that finds the pipe full is lost, not waited for.
    os.set_blocking(theirs, False)
    os.set_blocking(ours, False)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=theirs,
            stderr=theirs,
            process_group=0,
            bufsize=0,
            env={name: value for name, value in os.environ.items() if name not in SECRETS},
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    if process.stdin is not None:  # always: we asked for a pipe
        process.stdin.write(first_line)
    return process, ours
