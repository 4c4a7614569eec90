from __future__ import annotations

import hmac

import pytest

from trioengine.errors import AuthenticationError, ConfigError
from trioengine.http.auth import KeyCheck


@pytest.mark.parametrize(
    "header", ["Bearer secret", "bearer secret", "BEARER  secret ", "Bearer other"]
)
def test_any_of_the_keys_opens(header: str) -> None:
    KeyCheck(["secret", "other"]).check([header])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["secret"],
        ["Basic secret"],
        ["Bearer Secret"],
        ["Bearer secre"],
        ["Bearer secrets"],
        ["Bearer secret secret"],
        ["Bearer secret", "Bearer secret"],
        ["Bearer \x00"],
        ["Bearer ÿ"],
        ["Bearer secret, Bearer other"],
    ],
)
def test_anything_else_is_refused(headers: list[str]) -> None:
    with pytest.raises(AuthenticationError):
        KeyCheck(["secret", "other"]).check(headers)


def test_without_keys_everybody_may_pass() -> None:
    KeyCheck([]).check([])


@pytest.mark.parametrize("key", ["", " ", "\t"])
def test_an_empty_key_is_a_configuration_error(key: str) -> None:
    with pytest.raises(ConfigError):
        KeyCheck(["good", key])


def test_a_key_beyond_ascii_is_compared_as_utf8() -> None:
    KeyCheck(["schlüssel"]).check(["Bearer " + "schlüssel".encode().decode("latin-1")])


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    original = hmac.compare_digest

    def compare(offered: bytes, known: bytes) -> bool:
        compared.append(known)
        return original(offered, known)

    check = KeyCheck(["first", "second", "third"])
    monkeypatch.setattr(hmac, "compare_digest", compare)
    check.check(["Bearer first"])
    assert len(compared) == 3


def test_a_key_is_told_by_its_name_where_there_are_several() -> None:
    keys = KeyCheck(["one", "two"])
    names = {keys.check([f"Bearer {key}"]) for key in ("one", "two", "one")}
    assert len(names) == 2
    assert not names & {"one", "two", ""}
    assert KeyCheck(["one"]).check(["Bearer one"]) == ""
