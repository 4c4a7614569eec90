"""Reading the configuration, beating, and noticing the end; dying of it is in test_main."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from trioengine.engine_proc import lifeline
from trioengine.engine_proc.lifeline import Lifeline, read_config_line
from trioengine.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Died(Exception):
    """Stands for ``os._exit``."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    yield ours, theirs
    for descriptor in (ours, theirs):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test closed it


def test_the_line_may_come_in_pieces(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    threading.Thread(
        target=lambda: [os.write(theirs, piece) for piece in (b'{"a', b'":1}\n')]
    ).start()
    assert read_config_line(ours) == b'{"a":1}'


def test_what_follows_the_line_is_not_part_of_it(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"{}\nrest")
    assert read_config_line(pipe[0]) == b"{}"


def test_a_parent_that_is_gone_before_the_line(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b'{"unfinish')
    os.close(pipe[1])
    with pytest.raises(EOFError):
        read_config_line(pipe[0])


def test_it_beats_until_the_end_of_file_then_removes_and_exits(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir()
    page_path = runtime_dir / "heartbeat"
    HeartbeatPage.create(page_path)
    page = HeartbeatPage(page_path, writable=True)
    codes: list[int] = []

    def exit_instead(code: int) -> None:
        codes.append(code)
        raise Died

    beats: list[None] = []
    beat = page.beat

    def count() -> None:
        beat()
        beats.append(None)
        if len(beats) == 2:
            os.write(pipe[1], b"noise is not the end")
        if len(beats) == 4:
            os.close(pipe[1])

    monkeypatch.setattr(page, "beat", count)
    monkeypatch.setattr(os, "_exit", exit_instead)
    monkeypatch.setattr(lifeline, "BEAT_S", 0.001)
    with pytest.raises(Died):
        Lifeline(pipe[0], page, str(runtime_dir))._watch()
    assert codes == [1]
    assert len(beats) >= 4
    assert page.read().last_beat_s > 0
    assert not runtime_dir.exists()
    page.close()


def test_a_watch_that_fails_is_an_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HeartbeatPage.create(tmp_path / "page")
    page = HeartbeatPage(tmp_path / "page", writable=True)
    page.close()  # beating on it raises
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(TypeError, match="mmap"):
        Lifeline(0, page, str(tmp_path / "none"))._watch()
    assert codes == [1]
