"""The user's cache of models: entries that are whole or absent, made by one process at a time.

An entry is a directory or a file. Whoever makes one holds its lock and works on a staging path
beside it, which is renamed at the end: a reader needs no lock, and a process that is killed leaves
nothing that could be taken for an entry. The kernel drops a lock with its holder, so there are no
stale locks; staging paths are stale if their lock is free, and the next maker removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CACHE_VARIABLE", "cache_dir", "file_name", "make_entry"]

CACHE_VARIABLE: Final = "TRIOENGINE_CACHE_DIR"


def cache_dir() -> Path:
    """Return where models are kept: ``TRIOENGINE_CACHE_DIR``, or the platform's cache directory.

    Nothing is created.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("trioengine")


def file_name(text: str) -> str:
    """Return ``text`` as one harmless file name: no separator, no dot at the start, not long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip(".-")[:60] or "model"


def make_entry(
    entry: Path, make: Callable[[Path], None], *, on_wait: Callable[[], None] = lambda: None
) -> Path:
    """Return ``entry``, made if it is not there.

    Args:
        entry: Where it belongs.
        make: Called with a path that does not exist, to make the entry there; its errors pass.
        on_wait: Called once if another process is making it, before we wait for that process.

    Raises:
        ConfigError: The cache cannot be used.
    """
    if entry.exists():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(f".{entry.name}.lock"), on_wait):
            if not entry.exists():
                _make_staged(entry, make)
    except OSError as error:
        raise ConfigError(
            f"the model cache {entry.parent} cannot be used: {error} "
            f"(another place can be given in {CACHE_VARIABLE})"
        ) from error
    return entry


def _make_staged(entry: Path, make: Callable[[Path], None]) -> None:
    staging = entry.with_name(f".{entry.name}.part")
    _remove(staging)  # of a process that was killed: we hold the lock
    try:
        make(staging)
        _flush_to_disk(staging)
        staging.rename(entry)
    finally:
        _remove(staging)
    _flush_to_disk(entry.parent, contents=False)


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of ``path``, whose file stays: removing it would let two hold it at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush_to_disk(path: Path, *, contents: bool = True) -> None:
    """So that after a power cut, too, an entry that has its name has its bytes."""
    if contents and path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():
                _flush_to_disk(child)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
