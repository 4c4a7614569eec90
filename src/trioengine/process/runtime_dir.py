"""The private directory of one engine incarnation: sockets and heartbeat page, and who removes it.

Theory of operation
-------------------
The server makes the directory (mode 0700) and holds a lock on the file ``lock`` in it for as long
as it lives; the kernel drops the lock however the server ends. Whoever outlives the other removes
the directory: the server at its orderly end, the engine's lifeline when the server was killed. If
both were killed at once nobody is left, so each start sweeps its siblings whose lock is free.

The lock file gets its name only once it is locked, so no sweeper ever sees a living directory with
a free lock. A directory without one is either being made right now or was left half made: it is
swept when it is older than a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RuntimeDir"]

PREFIX: Final = "trioengine-"
MAX_SOCKET_PATH_BYTES: Final = 107  # sockaddr_un holds 108 with its terminating zero
LONGEST_NAME_BYTES: Final = 24  # of a file in the directory, its slash included
HALF_MADE_S: Final = 60.0


class RuntimeDir:
    """A fresh 0700 directory, locked by this process until ``remove``."""

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor: int | None = lock_descriptor

    @classmethod
    def create(cls, base: Path | None = None) -> RuntimeDir:
        """Sweep what dead servers left, then make and lock a new directory.

        Args:
            base: Where to make it; without it ``$XDG_RUNTIME_DIR``, ``$TMPDIR`` or ``/tmp``, the
                first that exists, is writable and is short enough for a socket's address.

        Raises:
            ConfigError: There is no such place.
        """
        parent = _usable(base)
        sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # 0700 whatever the umask
        unnamed = path / "lock.new"
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(path / "lock")
        return cls(path, descriptor)

    def remove(self) -> None:
        """Delete the directory and let go of the lock. Idempotent."""
        if self._lock_descriptor is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)  # the lifeline may be removing it as well
        os.close(self._lock_descriptor)
        self._lock_descriptor = None


def sweep(parent: Path) -> list[Path]:
    """Remove the directories in ``parent`` whose server is gone; return them."""
    swept = [path for path in _candidates(parent) if _abandoned(path)]
    for path in swept:
        shutil.rmtree(path, ignore_errors=True)  # two starts may sweep the same one
    return swept


def _usable(base: Path | None) -> Path:
    for place in _places() if base is None else (base,):
        longest = len(os.fsencode(place)) + len(PREFIX) + 9 + LONGEST_NAME_BYTES
        writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        if writable and longest <= MAX_SOCKET_PATH_BYTES:
            return place
    raise ConfigError(
        "no writable directory with a short enough path for sockets: set TMPDIR to one"
        if base is None
        else f"{base} is not a writable directory with a path short enough for sockets"
    )


def _places() -> Iterator[Path]:
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        if value := os.environ.get(variable):
            yield Path(value)
    yield Path("/tmp")


def _candidates(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _half_made(path: Path) -> bool:
    """True for one whose maker died before it had a lock; never for somebody's of a like name."""
    try:
        names = set(os.listdir(path))
        return names <= {"lock.new"} and time.time() - path.stat().st_mtime > HALF_MADE_S
    except OSError:
        return False


def _abandoned(path: Path) -> bool:
    """True if ``path`` is ours and no living process holds its lock."""
    try:
        status = path.stat()
        if status.st_uid != os.getuid():
            return False
        descriptor = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return _half_made(path)
    except OSError:
        return False  # gone in the meantime, or not ours to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
