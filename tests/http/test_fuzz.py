"""Whatever bytes a client sends, it gets an answer of the one shape, and the next one is served."""

from __future__ import annotations

import json
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from helpers.api_world import CHAT, COMPLETION, PATHS, body_for, open_world
from helpers.fuzzing import check_answer
from trioengine.http.schemas import ChatCompletionRequest, CompletionRequest

ALL_PATHS = (*PATHS, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
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


# What Python's own writer of JSON cannot be made to say, in place of a value.
SPOILS = [
    "NaN", "-Infinity", "1e999", "-1e-999", "9" * 400, "0." + "1" * 400, "01", "+1", '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\u0000"', '"\t"', "[" * 3000 + "]" * 3000, '{"a":' * 2000 + "1" + "}" * 2000,
    "[" * 5000, "'a'", "", "//", "true false", '{"a":1,"a":2}', "[1,]", '{"__proto__":1}',
]  # fmt: skip


def spoil(body: dict[str, Any], name: str, value: str, *, again: bool) -> bytes:
    """Return ``body`` as JSON with one more value as it is spelled, or with a second of a name."""
    text = json.dumps({key: inner for key, inner in body.items() if again or key != name})
    return f'{text[:-1]}, "{name}": {value}}}'.encode()


spoiled = st.builds(
    lambda drawn, name, value, again: (drawn[0], spoil(drawn[1], name, value, again=again)),
    bodies, st.sampled_from(names), st.sampled_from(SPOILS) | values.map(json.dumps),
    st.booleans(),
)  # fmt: skip

raw = st.one_of(
    st.tuples(st.sampled_from(ALL_PATHS), junk),
    spoiled,
    st.tuples(st.sampled_from(ALL_PATHS), bodies.map(lambda drawn: json.dumps(drawn[1]).encode())),
    bodies.map(lambda drawn: (drawn[0], json.dumps(drawn[1]).encode())),
    st.builds(lambda drawn, at: (drawn[0], cut(json.dumps(drawn[1]).encode(), at)), bodies,
              st.integers(0, 10_000)),
)  # fmt: skip


# Five thousand requests and more where the profile is `ci`: so many to a server, since to build one
# takes as long as to ask it ten times.
@settings(max_examples=4 * settings().max_examples // 5)
@given(st.lists(st.tuples(raw, headers), min_size=13, max_size=16))
def test_any_request_is_answered_in_the_one_shape(requests: list[Any]) -> None:
    trio.run(_send_all, requests, clock=MockClock(autojump_threshold=0))


async def _send_all(requests: list[Any]) -> None:
    async with open_world(running=True) as world:
        for (path, data), fields in requests:
            call = await world.api.post(path, data, headers=fields)
            assert call.status in EXPECTED, (call.status, call.body)
            check_answer(call.status, dict(call.headers), call.body)
        for path in (CHAT, COMPLETION):
            assert (await world.api.post(path, body_for(path, max_tokens=1))).status == 200
