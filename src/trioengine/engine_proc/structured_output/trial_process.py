"""The child of ``trials``: ``python -m`` this compiles what it reads, line by line.

Line 1 of standard input describes the compiler; each other is a specification, answered by a
``Verdict``. The main thread only reads, so that it sees the end of the input and leaves while the
other one compiles: the library lets go of the GIL. Memory and stack have less room than in the
engine, so what passes here passes there.
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.engine_proc.structured_output.trials import Verdict
from trioengine.errors import InvalidRequestError
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["main"]

_STACK_BYTES: Final = 48 * 2**20
_ADDRESS_BYTES: Final = 4 * 2**30  # the stacks of idle threads are most of what is not used


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to die here is nothing unusual
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_work, args=(lines, sys.stdout.buffer), daemon=True).start()
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # in the middle of whatever the other thread does


def _work(lines: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    try:
        compiler = GuidanceCompiler.described(lines.get())
        compiler.warm_up()
        answer = b"{}"
        while True:
            answers.write(answer + b"\n")
            answers.flush()
            structured = msgspec.json.decode(lines.get(), type=StructuredOutput)
            answer = msgspec.json.encode(_judged(compiler, structured))
    finally:
        os._exit(1)  # without this thread there is nothing to stay for


def _judged(compiler: GuidanceCompiler, structured: StructuredOutput) -> Verdict:
    try:
        compiler(structured)
    except InvalidRequestError as error:
        return Verdict(refusal=error.message)
    except Exception as error:  # contained: told to who asked for it
        return Verdict(fault=f"compiling a grammar failed: {type(error).__name__}: {error}"[:1000])
    return Verdict()


if __name__ == "__main__":
    main()
