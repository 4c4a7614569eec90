"""The thread that ends what does not end by itself."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trioengine.process.last_resort import LastResort

PATIENCE_S = 10.0


class Ending:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.code = -1
        self.cause = ""

    def __call__(self, code: int, cause: str) -> None:
        self.code, self.cause = code, cause
        self.happened.set()


def test_it_keeps_the_code_that_is_due() -> None:
    ending = Ending()
    last_resort = LastResort(ending)
    last_resort.arm(0.02, code=3, cause="the engine died")
    assert ending.happened.wait(PATIENCE_S)
    assert (ending.code, ending.cause) == (3, "the engine died")


def test_arming_again_never_puts_the_end_off_but_changes_the_code() -> None:
    ending = Ending()
    last_resort = LastResort(ending)
    last_resort.arm(0.05, code=0)
    last_resort.arm(1000.0, code=3, cause="later news")
    assert ending.happened.wait(PATIENCE_S)
    assert (ending.code, ending.cause) == (3, "later news")


def test_arming_again_brings_the_end_forward() -> None:
    ending = Ending()
    last_resort = LastResort(ending)
    last_resort.arm(1000.0, code=0)
    last_resort.arm(0.01)
    assert ending.happened.wait(PATIENCE_S)
    assert ending.code == 0


def test_disarmed_it_stays_quiet_and_keeps_the_code() -> None:
    ending = Ending()
    last_resort = LastResort(ending)
    last_resort.arm(1000.0, code=4)
    last_resort.disarm()
    last_resort.disarm()
    assert last_resort.code == 4
    assert not ending.happened.is_set()


def test_where_the_process_is_not_ours_only_the_code_is_kept() -> None:
    threads = threading.active_count()
    last_resort = LastResort()
    last_resort.arm(0.0, code=3)
    assert last_resort.code == 3
    assert threading.active_count() == threads


@pytest.mark.process
def test_it_ends_a_process_whose_main_thread_is_stuck() -> None:
    code = (
        "import threading; from trioengine.process.last_resort import LastResort, end_process;"
        "LastResort(end_process).arm(0.05, code=3, cause='the engine died');"
        "threading.Event().wait()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S)
    assert ended.returncode == 3
    assert b"the engine died" in ended.stderr
