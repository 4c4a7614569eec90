"""A child prepares the model; small scripts stand in for it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio

from helpers.server_process import process_lives, wait_until
from trioengine.errors import ConfigError, EngineStartError
from trioengine.process.model_preparation import prepare_in_child

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

PROLOGUE = """
import json, os, sys, threading, time
def say(**fields): print(json.dumps(fields), flush=True)
def end():
    while os.read(0, 1): pass
    os._exit(9)
threading.Thread(target=end, daemon=True).start()
"""


class Told:
    """What was told, and what passed through."""

    def __init__(self) -> None:
        self.progress: list[tuple[str, float]] = []
        self.output = b""
        self.first = trio.Event()

    async def prepare(self, script: str, patience_s: float = 20.0) -> Path:
        def tell(phase: str, fraction: float) -> None:
            self.progress.append((phase, fraction))
            self.first.set()

        def take(data: bytes) -> None:
            self.output += data

        argv = (sys.executable, "-S", "-E", "-c", PROLOGUE + script)
        with trio.fail_after(20):
            return await prepare_in_child("a-model", tell, take, patience_s=patience_s, argv=argv)


async def test_progress_is_told_and_the_directory_returned() -> None:
    told = Told()
    path = await told.prepare(
        "say(phase='fetching', fraction=0.0); say(phase='fetching', fraction=0.5)\n"
        "print('a word', file=sys.stderr)\n"
        "say(phase='converting', fraction=1.0); say(model_dir='/models/' + sys.argv[1])"
    )
    assert str(path) == "/models/a-model"
    assert told.progress == [("fetching", 0.0), ("fetching", 0.5), ("converting", 1.0)]
    assert told.output == b""


async def test_a_model_that_cannot_be_had_is_told_in_the_childs_words() -> None:
    script = "print('warning', file=sys.stderr); sys.stderr.write('no network\\n'); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"^no network$"):
        await Told().prepare(script)


async def test_a_checkpoint_that_does_not_load_is_a_failed_start() -> None:
    with pytest.raises(EngineStartError, match=r"^it is damaged$"):
        await Told().prepare("sys.stderr.write('it is damaged'); sys.exit(4)")


async def test_what_the_child_did_not_foresee_is_shown_whole() -> None:
    told = Told()
    with pytest.raises(EngineStartError, match=r"^KeyError: 'x'$"):
        await told.prepare("{}['x']")
    assert told.output.startswith(b"Traceback")
    assert told.output.endswith(b"KeyError: 'x'\n")


async def test_a_child_that_breaks_off_in_silence() -> None:
    with pytest.raises(EngineStartError, match="'a-model' was killed by SIGKILL"):
        await Told().prepare("os.kill(os.getpid(), 9)")


async def test_a_child_that_only_repeats_itself_makes_no_progress() -> None:
    told = Told()
    began_s = time.monotonic()
    with pytest.raises(EngineStartError, match=r"no progress for 0\.3 s"):
        await told.prepare(
            "while True: say(phase='fetching', fraction=0.5); time.sleep(0.01)", patience_s=0.3
        )
    assert told.progress == [("fetching", 0.5)]
    assert time.monotonic() - began_s < 5.0


async def test_cancelled_it_leaves_no_child_behind() -> None:
    told = Told()
    script = "say(phase='pid', fraction=os.getpid()); time.sleep(60)"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(told.prepare, script)
        await told.first.wait()
        nursery.cancel_scope.cancel()
    pid = int(told.progress[0][1])
    wait_until(lambda: not process_lives(pid), what="the child is gone")
