"""Whatever bytes a client sends, it gets an answer of the one shape, and the next one is served."""

from __future__ import annotations

import json
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from helpers.api_world import CHAT, COMPLETION, PATHS, body_for, open_world
from trioengine.http.schemas import ChatCompletionRequest, CompletionRequest

EXPECTED = {200, 400, 404, 429, 503, 504}  # 504: a time limit that the client has set

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**40, 1e308, "", "\x00", "é😀", [], {}]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
names = sorted({*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__})
changes = st.dictionaries(st.sampled_from(names), values, max_size=3)
# Bounded so that an accepted one ends soon.
bodies = st.tuples(st.sampled_from(PATHS), changes).map(
    lambda drawn: (drawn[0], body_for(drawn[0], max_tokens=2, n=1) | drawn[1])
)
junk = (
    st.binary(max_size=100)
    | st.text(max_size=100).map(str.encode)
    | values.map(lambda value: json.dumps(value).encode())
)
headers = st.dictionaries(
    st.sampled_from(
        ["Content-Type", "X-Request-Id", "X-Request-Timeout", "Authorization", "Origin", "Accept",
         "Content-Encoding", "Cookie", "Accept-Encoding", "Range", "If-None-Match"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
    max_size=3,
)  # fmt: skip


def cut(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


raw = st.one_of(
    st.tuples(st.sampled_from(PATHS), junk),
    bodies.map(lambda drawn: (drawn[0], json.dumps(drawn[1]).encode())),
    st.builds(lambda drawn, at: (drawn[0], cut(json.dumps(drawn[1]).encode(), at)), bodies,
              st.integers(0, 10_000)),
)  # fmt: skip


@given(st.lists(st.tuples(raw, headers), min_size=1, max_size=6))
def test_any_request_is_answered_in_the_one_shape(requests: list[Any]) -> None:
    trio.run(_send_all, requests, clock=MockClock(autojump_threshold=0))


async def _send_all(requests: list[Any]) -> None:
    async with open_world(running=True) as world:
        for (path, data), fields in requests:
            call = await world.api.post(path, data, headers=fields)
            assert call.status in EXPECTED, (call.status, call.body)
            if call.status != 200:
                assert call.error["type"] in {"invalid_request_error", "timeout_error"}
                assert call.error["message"]
            elif call.headers["content-type"].startswith("text/event-stream"):
                assert call.events[-1] == "[DONE]" or "error" in call.events[-1]
            else:
                assert call.json["choices"]
        for path in (CHAT, COMPLETION):
            assert (await world.api.post(path, body_for(path, max_tokens=1))).status == 200
