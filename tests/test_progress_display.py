"""A bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import itertools
import logging

import pytest
import trio
import trio.testing

from trioengine.client.engine_status import EngineStatus
from trioengine.progress_display import Narrator, bar, show_progress, terminal_drawer


@pytest.mark.parametrize(
    ("fraction", "line"),
    [
        (0.0, "loading  [------------------------------]   0%"),
        (0.5, "loading  [###############---------------]  50%"),
        (1.0, "loading  [##############################] 100%"),
        (7.0, "loading  [##############################] 700%"),
    ],
)
def test_bars(fraction: float, line: str) -> None:
    assert bar("loading", fraction) == line


async def test_each_phase_is_a_line_and_a_long_one_another_every_ten_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    status = EngineStatus()
    lines: list[tuple[float, str]] = []
    began_s = trio.current_time()
    narrator = Narrator(
        None,
        say=lambda line: lines.append((trio.current_time() - began_s, line)),
        clock=trio.current_time,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show_progress, status, narrator)
        await trio.sleep(1.0)
        status.set_progress("fetching", 0.1)
        await trio.sleep(22.0)
        status.set_progress("loading", 0.9)
        await trio.sleep(1.0)
        status.mark_ready()
    assert [line for _, line in lines] == [
        "starting (0%)",
        "fetching (10%)",
        "fetching (10%)",
        "fetching (10%)",
        "loading (90%)",
    ]
    times = [at_s for at_s, _ in lines]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 10.0


async def test_on_a_terminal_it_is_drawn_and_erased_at_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    status = EngineStatus()
    drawn: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(show_progress, status, Narrator(drawn.append))
        status.set_progress("loading", 0.5)
        await trio.sleep(1.0)
        status.mark_dead("it was killed")
    assert set(drawn[:-1]) == {bar("loading", 0.5)}
    assert drawn[-1] == ""


def test_without_a_terminal_nothing_is_drawn(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert terminal_drawer(lambda line: None) is None
    caplog.set_level(logging.INFO, "trioengine")
    narrator = Narrator(None)
    narrator.tell("fetching", 0.25)
    narrator.end()
    assert caplog.messages == ["fetching (25%)"]
    assert capsys.readouterr().err == ""
