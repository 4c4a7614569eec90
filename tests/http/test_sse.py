from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trioengine.http import sse


@given(st.dictionaries(st.text(), st.text()))
def test_an_event_is_one_data_line_and_a_blank_one(value: dict[str, str]) -> None:
    framed = sse.event(msgspec.json.encode(value))
    # str.splitlines would split at more than SSE does; bytes.splitlines does as SSE: LF, CR, CRLF.
    assert framed.splitlines()[1:] == [b""]
    assert msgspec.json.decode(framed.removeprefix(b"data: ").removesuffix(b"\n\n")) == value


def test_heartbeat_is_a_comment() -> None:
    assert sse.PING.startswith(b":")
    assert sse.PING.endswith(b"\n\n")
