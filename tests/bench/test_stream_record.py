"""Responses as bytes in portions: whatever the portions, the same record, and the right times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.bench.stream_record import StreamRecord, read_stream

EVENTS = [
    b'data: {"id":"x","choices":[{"index":0,"text":"One","finish_reason":null}]}\n\n',
    b": ping\n\n",
    b'data: {"choices":[{"text":" tw\xc3\xb6","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'  # noqa: ISC004
    b'"total_tokens":10,"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED_HEAD = HEAD + b"Transfer-Encoding: Chunked\r\n\r\n"


def chunked(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in (*payloads, b""))


def plain(*payloads: bytes) -> bytes:
    return HEAD + b"\r\n" + b"".join(payloads)


def read(*portions: bytes, error: str = "") -> StreamRecord:
    """Portion number i comes at i seconds."""
    return read_stream(-1.0, 99.0, [(float(i), data) for i, data in enumerate(portions)], error)


RESPONSES = {
    "one event a chunk": CHUNKED_HEAD + chunked(*EVENTS),
    "all in one chunk": CHUNKED_HEAD + chunked(b"".join(EVENTS)),
    "chunks across events": CHUNKED_HEAD
    + chunked(*(b"".join(EVENTS)[i : i + 11] for i in range(0, len(b"".join(EVENTS)), 11))),
    "until the end of the connection": plain(*EVENTS),
    "lines that end with CR LF": plain(*(event.replace(b"\n", b"\r\n") for event in EVENTS)),
}


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_split_anywhere_it_says_the_same(response: bytes) -> None:
    for cut in range(len(response) + 1):
        record = read(response[:cut], response[cut:])
        assert (record.ok, record.error) == (True, "")
        assert (record.status, record.finish_reason, record.done) == (200, "length", True)
        assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
        assert (record.cached_tokens, record.output_tokens) == (4, 3)
        assert len(record.text_times_s) == 2


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_an_event_comes_with_its_last_byte(response: bytes) -> None:
    def times(cut: int) -> list[float]:
        return read(response[:cut], response[cut:]).text_times_s

    moments = [times(cut) for cut in range(len(response) + 1)]
    for event in range(2):  # late as long as one byte of it is missing, then early, and for good
        late = [moment[event] == 1.0 for moment in moments]
        assert late == sorted(late, reverse=True)
        first_early = late.index(False)
        assert b"\n" in response[first_early - 1 : first_early]
        assert b"text" in response[:first_early]
    assert moments[0] == [1.0, 1.0]
    assert moments[-1] == [0.0, 0.0]


@given(st.data())
def test_any_portions_and_their_exact_times(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1))
    payload = b"".join(EVENTS)
    whole = CHUNKED_HEAD + chunked(payload)
    portions, position = [], 0
    for size in (*sizes, len(whole)):
        portions.append(whole[position : position + size])
        position += size
    record = read(*portions)
    assert record.ok
    # By another way: the first moment at which the event's last byte is among what has come.
    begin = whole.index(payload)
    ends = [begin + len(b"".join(EVENTS[: i + 1])) for i in (0, 2)]
    for end, time_s in zip(ends, record.text_times_s, strict=True):
        come = 0
        for moment, portion in enumerate(portions):
            come += len(portion)
            if come >= end:
                assert time_s == moment
                break


def test_every_cut_off_response_fails() -> None:
    whole = CHUNKED_HEAD + chunked(*EVENTS)
    needed = whole.index(b"[DONE]\n\n") + len(b"[DONE]\n\n")
    for length in range(needed):
        assert not read(whole[:length]).ok, length
    assert read(whole[:needed]).ok


def test_what_is_missing_is_said() -> None:
    assert read().complaint == "status 0: no response"
    assert read(plain(*EVENTS[:-1])).complaint == "the stream ended without [DONE]"
    assert read(plain(EVENTS[0], EVENTS[-1])).complaint == (
        "the stream ended without a finish reason"
    )
    assert read(plain(*EVENTS), error="reset").complaint == "status 200: reset"


def test_an_error_event_fails_the_request() -> None:
    record = read(plain(EVENTS[0], b'data: {"error":{"message":"gone"}}\n\n', *EVENTS[3:]))
    assert not record.ok
    assert "gone" in record.complaint


def test_nonsense_in_an_event_fails_the_request() -> None:
    assert "an event that is none" in read(plain(b"data: {]\n\n", *EVENTS)).complaint


def test_a_refusal_is_quoted() -> None:
    body = b'{"error":{"message":"too long"}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 32\r\n\r\n"
    assert read(head + body).complaint == 'status 400: {"error":{"message":"too long"}}'
    no_head = read(b"nonsense\r\n\r\n")
    assert (no_head.status, no_head.ok) == (0, False)


def test_without_usage_events_are_counted() -> None:
    record = read(plain(*EVENTS[:4], EVENTS[5]))
    assert record.ok
    assert (record.completion_tokens, record.output_tokens) == (None, 2)


def test_an_event_of_several_lines_is_one() -> None:
    split = EVENTS[0].replace(b'"choices"', b'\ndata: "choices"')
    assert len(read(plain(split, *EVENTS[3:])).text_times_s) == 1
