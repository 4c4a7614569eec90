from __future__ import annotations

import pytest

from trioengine.http.malformed import MAX_BYTES, find_culprit


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (b'{"temperature": NaN}', "temperature", "NaN"),
        (b'{"model": "a", "top_p": -Infinity}', "top_p", "-Infinity"),
        (b'{"logit_bias": {"5": Infinity}}', "logit_bias.5", "Infinity"),
        (b'{"prompt": ["a", "b\\ud83d"]}', "prompt[1]", "surrogate"),
        (b'{"messages": [{"content": "\\udc00x"}]}', "messages[0].content", "surrogate"),
    ],
)
def test_what_json_does_not_have_is_named(body: bytes, param: str, reason: str) -> None:
    found = find_culprit(body)
    assert found is not None
    assert found.param == param
    assert reason in found.reason


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"a": }',
        b'{"a": "NaN", "b": "\\ud83d\\ude00"}',
        b"[" * 10_000,
        b'{"temperature": NaN, "a": "' + b"x" * MAX_BYTES + b'"}',
    ],
)
def test_anything_else_has_no_name(body: bytes) -> None:
    assert find_culprit(body) is None
