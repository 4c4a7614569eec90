"""A stream that loses what nobody reads, instead of waiting."""

from __future__ import annotations

import os
import sys

import pytest

from trioengine.engine_proc import lossy_stream
from trioengine.engine_proc.lossy_stream import LossyStream, make_standard_streams_lossy


def test_what_fits_is_written_at_once() -> None:
    ours, theirs = os.pipe()
    stream = LossyStream(theirs)
    assert stream.write("déjà vu\n") == 8
    assert os.read(ours, 100).decode() == "déjà vu\n"
    print("more", file=stream)
    assert os.read(ours, 100) == b"more\n"
    assert (stream.fileno(), stream.encoding, stream.writable()) == (theirs, "utf-8", True)
    os.close(ours)
    os.close(theirs)


def test_a_full_pipe_loses_text_and_never_waits() -> None:
    ours, theirs = os.pipe()
    stream = LossyStream(theirs)
    for _ in range(100):
        assert stream.write("x" * 10_000) == 10_000
    os.close(ours)
    os.close(theirs)


def test_a_reader_that_is_gone_is_no_error() -> None:
    ours, theirs = os.pipe()
    stream = LossyStream(theirs)
    os.close(ours)
    assert stream.write("anybody?") == 8
    os.close(theirs)


def test_a_lone_surrogate_is_no_error() -> None:
    ours, theirs = os.pipe()
    LossyStream(theirs).write("\ud800")
    assert os.read(ours, 100) == rb"\ud800"
    os.close(ours)
    os.close(theirs)


def test_a_closed_descriptor_is_an_error() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    os.close(theirs)
    with pytest.raises(OSError, match="Bad file descriptor"):
        LossyStream(theirs)


def test_the_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(lossy_stream, "LossyStream", made.append)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    make_standard_streams_lossy()
    assert made == [1, 2]
