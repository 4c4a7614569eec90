"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import trioengine
from trioengine import cli
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str, module: str = "trioengine") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.process
def test_python_m_is_the_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"trioengine {trioengine.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["serve", "--help"], 0), ([], 2), (["serve", "--nope"], 2), (["x"], 2)],
)
def test_usage(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == code
    assert ("error" in capsys.readouterr().err) == (code == 2)


def test_help_says_where_options_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    help_ = " ".join(capsys.readouterr().out.split())
    assert "--max-queue is TRIOENGINE_MAX_QUEUE" in help_
    assert "Exit codes: 0 asked to stop" in help_
    assert "(default: smollm2-135m-instruct)" in help_


def test_models_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIOENGINE_CACHE_DIR", str(tmp_path))
    assert cli.main(["models", "list"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_models_path_of_what_is_not_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: str) -> Path:
        raise ConfigError(f"{names} is not in the cache")

    monkeypatch.setattr("trioengine.models.command.model_path", refuse)
    assert cli.main(["models", "path"]) == 2
    assert capsys.readouterr().err == "trioengine: () is not in the cache\n"
    assert cli.main(["models", "path", "x"]) == 2
    assert capsys.readouterr().err == "trioengine: ('x',) is not in the cache\n"


def test_models_path_prints_the_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert cli.main(["models", "path", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


@pytest.mark.process
def test_models_fetch_prints_the_directory_alone_on_stdout(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    done = run("models", "fetch", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")


@pytest.mark.process
def test_models_fetch_of_nothing_is_one_sentence() -> None:
    done = run("models", "fetch", "does-not-exist")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("trioengine: model 'does-not-exist' not found")
