"""The private directory: who may look into it, and who removes it when."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trioengine.errors import ConfigError
from trioengine.process import runtime_dir
from trioengine.process.runtime_dir import RuntimeDir, sweep


def test_it_is_private_and_goes_away(tmp_path: Path) -> None:
    directory = RuntimeDir.create(tmp_path)
    assert directory.path.parent == tmp_path
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_living_servers_directory_is_left_alone(tmp_path: Path) -> None:
    directory = RuntimeDir.create(tmp_path)
    assert sweep(tmp_path) == []
    assert directory.path.exists()
    directory.remove()


@pytest.mark.process
def test_what_a_killed_server_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from trioengine.process.runtime_dir import RuntimeDir;"
        "d = RuntimeDir.create(pathlib.Path(sys.argv[1])); (d.path / 'commands').touch();"
        "print(d.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip())
        assert sweep(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert left.exists()
    RuntimeDir.create(tmp_path).remove()
    assert not left.exists()


def test_a_half_made_directory_is_given_a_minute(tmp_path: Path) -> None:
    half_made = tmp_path / "trioengine-halfmade"
    half_made.mkdir()
    assert sweep(tmp_path) == []
    long_ago = half_made.stat().st_mtime - 2 * runtime_dir.HALF_MADE_S
    os.utime(half_made, (long_ago, long_ago))
    assert sweep(tmp_path) == [half_made]


def test_nothing_but_our_own_directories_is_swept(tmp_path: Path) -> None:
    (tmp_path / "trioengine-file").touch()
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "lock").touch()
    (tmp_path / "trioengine-link").symlink_to(tmp_path / "something")
    assert sweep(tmp_path) == []


def test_a_directory_with_something_of_a_stranger_in_it_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "trioengine-notes"
    notes.mkdir()
    (notes / "precious.txt").write_text("kept for years")
    os.utime(notes, (0.0, 0.0))
    assert sweep(tmp_path) == []
    assert (notes / "precious.txt").exists()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="short enough for sockets"):
        RuntimeDir.create(deep)


def test_an_unusable_place_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = RuntimeDir.create()
    assert directory.path.parent == tmp_path
    longest = os.fsencode(directory.path / ("x" * (runtime_dir.LONGEST_NAME_BYTES - 1)))
    assert len(longest) <= runtime_dir.MAX_SOCKET_PATH_BYTES
    directory.remove()
