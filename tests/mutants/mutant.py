"""One slip, and the tests whose business it is."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = [
    "BLOCKS",
    "CORE",
    "DEATHS",
    "HISTORIES",
    "KEEPER",
    "NAP",
    "QUEUE",
    "SCHEDULER",
    "STATUS",
    "TEXT",
    "Mutant",
]

HISTORIES: Final = ("tests/property/test_server_histories.py",)
BLOCKS: Final = ("tests/property/test_block_pool.py",)
SCHEDULER: Final = ("tests/property/test_scheduler.py",)
DEATHS: Final = ("tests/property/test_crash_paths.py",)
QUEUE: Final = ("tests/client/test_request_queue.py",)
STATUS: Final = ("tests/client/test_engine_status.py",)
CORE: Final = ("tests/engine_proc/test_core_refusals.py",)
TEXT: Final = ("tests/property/test_detokenizer.py",)
KEEPER: Final = (
    "tests/process/test_engine_keeper.py",
    "tests/process/test_engine_keeper_replay.py",
    "tests/process/test_engine_keeper_stalls.py",
)
NAP: Final = ("tests/process/test_engine_sleep.py",)


class Mutant(NamedTuple):
    """One slip.

    Attributes:
        name: Unique.
        invariant: What it breaks.
        file: Below ``src/trioengine``.
        old: Text that is there exactly once.
        new: What takes its place.
        tests: Arguments of pytest that must fail.
    """

    name: str
    invariant: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = HISTORIES
