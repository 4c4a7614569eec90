from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest

from trioengine.errors import ConfigError
from trioengine.models.store import cache_dir, file_name, make_entry

if TYPE_CHECKING:
    from pathlib import Path


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "content").write_text("whole")


def never(path: Path) -> None:
    pytest.fail(f"{path} was made again")


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    entry = tmp_path / "deep" / "entry"
    assert make_entry(entry, make_directory) == entry
    assert make_entry(entry, never) == entry
    assert (entry / "content").read_text() == "whole"
    assert [path.name for path in entry.parent.glob("*")] == [".entry.lock", "entry"]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        make_directory(path)
        raise KeyError

    with pytest.raises(KeyError):
        make_entry(tmp_path / "entry", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]
    make_entry(tmp_path / "entry", make_directory)


def test_nobody_sees_half_an_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def make(path: Path) -> None:
        make_directory(path)
        assert not entry.exists()

    make_entry(entry, make)
    assert entry.exists()


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    """The second waits for the first, is told so, and then finds the entry."""
    entry = tmp_path / "entry"
    making, second_waits = threading.Event(), threading.Event()

    def make(path: Path) -> None:
        making.set()
        assert second_waits.wait(10)
        make_directory(path)

    first = threading.Thread(target=make_entry, args=(entry, make))
    first.start()
    assert making.wait(10)
    make_entry(entry, never, on_wait=second_waits.set)
    assert (entry / "content").read_text() == "whole"
    first.join()


@pytest.mark.process
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_process_leaves_neither_lock_nor_half(tmp_path: Path, moment: str) -> None:
    entry = tmp_path / "entry"
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from trioengine.models.store import make_entry
        def make(path):
            path.mkdir()
            if {moment == "after"}:
                (path / "half").write_text("half")
                (path / "deep").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
        make_entry(Path(sys.argv[1]), make)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(entry)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not entry.exists()
    waited: list[None] = []
    make_entry(entry, make_directory, on_wait=lambda: waited.append(None))
    assert not waited
    assert [path.name for path in entry.iterdir()] == ["content"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".entry.lock", "entry"]


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, flushed = tmp_path / "entry", []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), entry.exists()))

    monkeypatch.setattr("os.fsync", fsync)
    make_entry(entry, make_directory)
    staging = str(tmp_path / ".entry.part")
    assert flushed == [(f"{staging}/content", False), (staging, False), (str(tmp_path), True)]


def test_a_cache_that_cannot_be_used_says_how_to_choose_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="TRIOENGINE_CACHE_DIR"):
        make_entry(tmp_path / "file" / "entry", make_directory)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRIOENGINE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "trioengine"
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", "relative")
    assert cache_dir().is_absolute()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SmolLM2.Q4_1", "SmolLM2.Q4_1"),
        ("../../etc/passwd", "etc-passwd"),
        (".hidden", "hidden"),
        ("a/b\\c d\0e", "a-b-c-d-e"),
        ("..", "model"),
        ("", "model"),
        ("x" * 300, "x" * 60),
        ("日本", "model"),
    ],
)
def test_file_names_are_harmless(text: str, expected: str) -> None:
    assert file_name(text) == expected
