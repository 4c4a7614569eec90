from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.http.request_id import request_id


@pytest.mark.parametrize("offered", ["a", "req_0", "0f6e-4b", "a" * 128, "trace:1/2=3+4@x~.y"])
def test_short_and_safe_is_echoed(offered: str) -> None:
    assert request_id(offered) == offered


@pytest.mark.parametrize(
    "offered",
    [None, "", "a" * 129, "a b", "a\r\nSet-Cookie: x", "é", '"', "a\n", "a;b", "\x1b[31m"],
)
def test_anything_else_is_replaced(offered: str | None) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id(offered))


@given(st.text())
def test_what_is_returned_is_always_safe(offered: str) -> None:
    assert re.fullmatch(r"[!-~]{1,128}", request_id(offered))


def test_fresh_ids_differ() -> None:
    assert request_id(None) != request_id(None)
