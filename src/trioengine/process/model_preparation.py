"""Have a model fetched and converted by a child, and tell how far it is."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trioengine.bare_errors import bare_errors
from trioengine.errors import ConfigError, EngineStartError
from trioengine.exit_codes import ExitCode
from trioengine.process.engine_process import OutputTail, describe_exit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

__all__ = ["prepare_in_child"]

CHILD_ARGV: Final = (sys.executable, "-P", "-m", "trioengine.models.child", "--lifeline")
LIFELINE_S: Final = 1.0  # from cutting the lifeline to SIGKILL
REAP_S: Final = 3.0
TRACE_LINES: Final = 200


async def prepare_in_child(
    name: str,
    progress: Callable[[str, float], None],
    pass_through: Callable[[bytes], None],
    *,
    patience_s: float,
    argv: Sequence[str] = CHILD_ARGV,
) -> Path:
    """Return the directory of the checkpoint that the child has prepared.

    Args:
        name: The model, as the user gave it.
        progress: Told of phase and fraction.
        pass_through: Takes what the child has written on standard error, where it ended in a way
            that it did not foresee; never waits.
        patience_s: Longest time without any progress.
        argv: What to run; tests run other things.

    Raises:
        ConfigError: The model cannot be had; the child's own sentence.
        EngineStartError: It does not load, or the child broke off or got stuck.
    """
    tail = OutputTail(max_lines=TRACE_LINES)
    with bare_errors():
        async with _running([*argv, name]) as child, trio.open_nursery() as nursery:
            nursery.start_soon(_pump, _pipe(child.stderr), tail)
            model_dir = await _follow(_pipe(child.stdout), progress, patience_s)
            returncode = await child.wait()
    if returncode == ExitCode.ASKED and model_dir is not None:
        return Path(model_dir)
    lines = tail.lines() or [f"the preparation of model {name!r} {describe_exit(returncode)}"]
    if returncode == ExitCode.USAGE:
        raise ConfigError(lines[-1])
    if returncode != ExitCode.ENGINE_NOT_STARTED:
        pass_through("".join(f"{line}\n" for line in lines).encode())
    raise EngineStartError(lines[-1])


@asynccontextmanager
async def _running(argv: Sequence[str]) -> AsyncIterator[trio.Process]:
    """Run a child that ends with its standard input; be sure of its end at the end of the block."""
    child = await trio.lowlevel.open_process(
        list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield child
    finally:
        with trio.move_on_after(REAP_S, shield=True):
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    await stream.aclose()  # the lifeline: it ends, with whatever it started
            with trio.move_on_after(LIFELINE_S):
                await child.wait()
            child.kill()
            await child.wait()


async def _follow(
    output: trio.abc.ReceiveStream, progress: Callable[[str, float], None], patience_s: float
) -> str | None:
    """Read the child's lines to their end; return the directory, if it named one."""
    model_dir: str | None = None
    last: tuple[str, float] | None = None
    rest = b""
    deadline_s = trio.current_time() + patience_s
    while True:
        with trio.move_on_at(deadline_s) as scope:
            data = bytes(await output.receive_some())
        if scope.cancelled_caught:
            raise EngineStartError(f"the model is not prepared: no progress for {patience_s:g} s")
        if not data:
            return model_dir
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line, type=_Line)
            model_dir = said.model_dir or model_dir
            reached = (said.phase, said.fraction)
            if said.phase and reached != last:  # it repeats itself: to live is no progress
                last, deadline_s = reached, trio.current_time() + patience_s
                progress(*reached)


class _Line(msgspec.Struct):
    """A line of the child's standard output."""

    phase: str = ""
    fraction: float = 0.0
    model_dir: str | None = None


async def _pump(output: trio.abc.ReceiveStream, tail: OutputTail) -> None:
    while data := bytes(await output.receive_some()):
        tail.feed(data)


def _pipe(stream: trio.abc.ReceiveStream | None) -> trio.abc.ReceiveStream:
    if stream is None:
        raise ValueError("the child was to have a pipe")
    return stream
