from __future__ import annotations

import pytest

from trioengine.http.cors import Cors

ORIGIN = "https://a.example"


@pytest.mark.parametrize("origin", [None, "https://evil.example", "null", "https://a.example.evil"])
def test_other_origins_get_nothing(origin: str | None) -> None:
    assert Cors([ORIGIN]).headers(origin) == {}
    assert Cors([ORIGIN]).preflight(origin, None) is None


def test_without_origins_nobody_gets_anything() -> None:
    assert Cors([]).headers(ORIGIN) == {}


def test_a_named_origin_is_answered_by_name() -> None:
    headers = Cors([ORIGIN]).headers(ORIGIN)
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    assert headers["Vary"] == "Origin"


def test_any_origin() -> None:
    assert Cors(["*"]).headers(ORIGIN)["Access-Control-Allow-Origin"] == "*"


def test_preflight_allows_what_was_asked_for() -> None:
    headers = Cors([ORIGIN]).preflight(ORIGIN, "authorization,x-stainless-os")
    assert headers is not None
    assert headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
    assert "POST" in headers["Access-Control-Allow-Methods"]
