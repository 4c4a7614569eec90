"""Logging that never waits and never floods."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import pytest

from trioengine import log
from trioengine.log import LineSink, RateLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def read_all(self) -> bytes:
        """Close the writing end and return everything."""
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as stream:
            return stream.read()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    ours = logging.getLogger("trioengine")
    before = root.handlers[:], root.level, ours.level
    yield root
    logging.captureWarnings(capture=False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_lines_arrive_in_order() -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer)
    for number in range(100):
        sink.write(b"%d\n" % number)
    sink.close(PATIENCE_S)
    assert pipe.read_all().split() == [b"%d" % number for number in range(100)]


def test_a_reader_that_does_not_read_costs_lines_and_no_time() -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer, max_pending_bytes=200_000)
    for _ in range(100):
        sink.write(b"x" * 9_999 + b"\n")  # pipe and queue together hold less than that
    assert not sink.flush(timeout_s=0.0)
    received: list[bytes] = []
    drained = threading.Event()

    def read() -> None:
        with os.fdopen(pipe.reader, "rb") as stream:
            for line in stream:
                received.append(line)
                if b"late" in line:
                    drained.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert sink.flush(PATIENCE_S)
    sink.write(b"late\n")
    assert drained.wait(PATIENCE_S)
    sink.close(PATIENCE_S)
    os.close(pipe.writer)
    reader.join()
    assert len(received) < 100
    assert any(b"writes to the log were dropped" in line for line in received)


def test_a_closed_descriptor_is_survived() -> None:
    pipe = Pipe()
    os.close(pipe.reader)
    sink = LineSink(pipe.writer)
    sink.write(b"nobody reads this\n")  # EPIPE
    assert sink.flush(PATIENCE_S)
    sink.close(PATIENCE_S)
    os.close(pipe.writer)


def test_a_non_blocking_descriptor_is_waited_for() -> None:
    pipe = Pipe()
    os.set_blocking(pipe.writer, False)
    sink = LineSink(pipe.writer)
    sink.write(b"x" * 500_000)
    with os.fdopen(os.dup(pipe.reader), "rb") as stream:
        assert len(stream.read(500_000)) == 500_000
    sink.close(PATIENCE_S)
    pipe.read_all()


def test_text_lines(root: logging.Logger) -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer)
    log.configure("text", "info", sink)
    logging.getLogger("trioengine.supervisor").info("engine is %s", "ready")
    logging.getLogger("trioengine.supervisor").debug("too quiet")
    logging.getLogger("foreign").info("not ours")
    logging.getLogger("foreign").warning("ours too")
    sink.close(PATIENCE_S)
    first, second = pipe.read_all().decode().splitlines()
    assert first.endswith("INFO    trioengine.supervisor: engine is ready")
    assert second.endswith("WARNING foreign: ours too")


def test_json_lines(root: logging.Logger) -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer)
    log.configure("json", "debug", sink)
    try:
        raise ValueError("cause")
    except ValueError:
        logging.getLogger("trioengine.x").exception("with\nbreak")
    sink.close(PATIENCE_S)
    (line,) = pipe.read_all().splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == (
        "error",
        "trioengine.x",
        "with\nbreak",
    )
    assert fields["traceback"].endswith("ValueError: cause")


def test_a_bad_log_call_is_survived(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer)
    log.configure("text", "info", sink)
    logging.getLogger("trioengine.x").info("%d", "not a number")
    sink.close(PATIENCE_S)
    assert pipe.read_all() == b""
    assert "not a number" in capsys.readouterr().err


def test_warnings_are_logged(root: logging.Logger) -> None:
    pipe = Pipe()
    sink = LineSink(pipe.writer)
    log.configure("text", "info", sink)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("mind this", stacklevel=1)
    sink.close(PATIENCE_S)
    assert b"mind this" in pipe.read_all()


def record(message: str, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("trioengine.x", level, __file__, 1, message, (), None)


def test_errors_of_a_kind_are_limited_and_counted() -> None:
    now = 0.0
    limit = RateLimit(limit=3, window_s=10.0, clock=lambda: now)
    assert [limit.filter(record("broken")) for _ in range(5)] == [True, True, True, False, False]
    assert limit.filter(record("another kind"))
    now = 10.0
    later = record("broken")
    assert limit.filter(later)
    assert later.getMessage() == "broken (and 2 more like this before)"


def test_information_is_not_limited() -> None:
    limit = RateLimit(limit=1, window_s=10.0, clock=lambda: 0.0)
    assert all(limit.filter(record("news", logging.INFO)) for _ in range(5))


def test_kinds_are_bounded() -> None:
    limit = RateLimit(limit=1, window_s=10.0, clock=lambda: 0.0)
    for number in range(3 * log.MAX_KINDS):
        limit.filter(record(f"kind {number}"))
    assert sys.getsizeof(limit._kinds) < 200_000
