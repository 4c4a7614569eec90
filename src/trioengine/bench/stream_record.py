"""From the bytes of one response, and when each part of them came, to what a benchmark counts.

Runs when nothing is measured any more, so it is written to be right, not to be fast. It reads
HTTP/1.1 (chunked or not) and server-sent events; an event's time is the arrival of its last byte.

Source: RFC 9112, sections 6 and 7.1; WHATWG HTML, section 9.2.6 (a lone CR as a line's end, which
no server sends, is left out).
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Arrivals = Sequence[tuple[float, bytes]]

__all__ = ["StreamRecord", "read_stream"]

_SAID_AT_MOST: Final = 600  # bytes of a refusal that are kept
_DONE: Final = b"[DONE]"


class StreamRecord(msgspec.Struct, kw_only=True):
    """One request, as its client saw it. Times are seconds of one clock.

    Attributes:
        begin_s: When its connection was begun to be opened.
        end_s: When the response had ended.
        status: HTTP status; 0 without a response.
        error: What went wrong, or ``""``.
        finish_reason: The last one that was told.
        done: ``[DONE]`` came.
        prompt_tokens: By the server's count, if it told.
        completion_tokens: The same.
        cached_tokens: Prompt tokens that a prefix cache held.
        text_times_s: When each event with text came.
    """

    begin_s: float
    end_s: float
    status: int = 0
    error: str = ""
    finish_reason: str | None = None
    done: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    text_times_s: list[float] = []

    @property
    def ok(self) -> bool:
        """It ended as a stream should. Only then it counts."""
        whole = self.finish_reason is not None and self.done
        return self.status == 200 and whole and not self.error

    @property
    def complaint(self) -> str:
        """Why it does not count, in a few words."""
        if self.error or self.status != 200:
            return f"status {self.status}: {self.error or 'no reason given'}"
        missing = "a finish reason" if self.finish_reason is None else "[DONE]"
        return f"the stream ended without {missing}"

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; events with text, where the server has not told."""
        if self.completion_tokens is None:
            return len(self.text_times_s)
        return self.completion_tokens


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedDetails | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


def read_stream(begin_s: float, end_s: float, arrivals: Arrivals, error: str = "") -> StreamRecord:
    """Return the record of one response to ``POST /v1/completions`` with ``"stream": true``.

    Args:
        begin_s: When the request began.
        end_s: When its connection had ended.
        arrivals: What came when, in order, in any portions.
        error: What broke the connection, if something did.
    """
    record = StreamRecord(begin_s=begin_s, end_s=end_s, error=error)
    raw = b"".join(data for _, data in arrivals)
    head, blank, _ = raw.partition(b"\r\n\r\n")
    if not blank:
        record.error = record.error or "no response"
        return record
    status_line, *fields = head.split(b"\r\n")
    record.status = _status(status_line)
    body = _Body(raw, len(head) + len(blank), is_chunked=_is_chunked(fields))
    if record.status != 200:
        record.error = record.error or body.payload[:_SAID_AT_MOST].decode(errors="replace")
        return record
    clock = _Clock(arrivals)
    for end, data in _events(body.payload):
        _note(record, data, clock.time_of(body.raw_end(end)))
    return record


def _status(line: bytes) -> int:
    words = line.split(None, 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _is_chunked(fields: Sequence[bytes]) -> bool:
    named = (field.lower().partition(b":") for field in fields)
    return any(name.strip() == b"transfer-encoding" and b"chunked" in v for name, _, v in named)


class _Clock:
    """Says when a byte came, by its number among all bytes of the connection."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._times = [time_s for time_s, _ in arrivals]
        self._ends = list(itertools.accumulate(len(data) for _, data in arrivals))

    def time_of(self, end: int) -> float:
        """Return when the byte before offset ``end`` came."""
        return self._times[bisect.bisect_left(self._ends, end)]


class _Body:
    """A response's content, and where in the raw bytes each of its own bytes lay.

    Attributes:
        payload: The content, without chunk sizes; as much of it as has come.
    """

    def __init__(self, raw: bytes, begin: int, *, is_chunked: bool) -> None:
        pieces = list(_chunks(raw, begin)) if is_chunked else [(begin, raw[begin:])]
        self.payload = b"".join(data for _, data in pieces)
        self._begins = [offset for offset, _ in pieces]
        self._ends = list(itertools.accumulate(len(data) for _, data in pieces))

    def raw_end(self, end: int) -> int:
        """Return the raw offset just behind the byte that ends ``payload[:end]``."""
        piece = bisect.bisect_left(self._ends, end)
        return self._begins[piece] + end - (self._ends[piece - 1] if piece else 0)


def _chunks(raw: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, data) of each chunk; the last one may have been cut off."""
    while (line_end := raw.find(b"\r\n", position)) >= 0:
        try:
            size = int(raw[position:line_end].split(b";")[0], 16)
        except ValueError:
            return
        if size <= 0:
            return
        begin = line_end + 2
        yield begin, raw[begin : begin + size]
        position = begin + size + 2


def _events(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset just behind the event, its data) for each event that is whole."""
    data: list[bytes] = []
    position = 0
    while (line_end := payload.find(b"\n", position)) >= 0:
        line = payload[position:line_end].removesuffix(b"\r")
        position = line_end + 1
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield position, b"\n".join(data)
            data = []


def _note(record: StreamRecord, data: bytes, time_s: float) -> None:
    if data.strip() == _DONE:
        record.done = True
        return
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError as error:
        record.error = record.error or f"an event that is none: {error}"
        return
    if event.error:
        record.error = record.error or str(event.error)[:_SAID_AT_MOST]
    if event.usage is not None:
        _note_usage(record, event.usage)
    for choice in event.choices or ():
        record.finish_reason = choice.finish_reason or record.finish_reason
        if choice.text:
            record.text_times_s.append(time_s)


def _note_usage(record: StreamRecord, usage: _Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
