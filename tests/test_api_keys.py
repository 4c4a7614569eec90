"""Keys from the command line and a file; what they are called, and their shares."""

from __future__ import annotations

import pytest

from trioengine.api_keys import all_keys, key_digest, key_name, key_shares, read_key_lines
from trioengine.config import ServerConfig


def test_a_file_has_a_key_a_line_and_weights() -> None:
    text = "# ours\nalpha\n\n  beta 2.5 \n"
    assert read_key_lines(text) == {"alpha": 1.0, "beta": 2.5}


@pytest.mark.parametrize("line", ["a b", "a 1 2", "a 0", "a -1", "a nan", "a inf", "a 1001"])
def test_a_line_that_is_neither_is_named_without_its_secret(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 must be") as caught:
        read_key_lines(f"good\nsecret{line}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_a_file_without_keys_would_open_the_doors(text: str) -> None:
    with pytest.raises(ValueError, match="at least one"):
        read_key_lines(text)


def test_keys_of_both_sources_open_and_have_shares_by_name() -> None:
    config = ServerConfig(api_keys=("a", "b"), api_key_weights={"b": 3.0, "c": 1.0})
    assert all_keys(config) == ("a", "b", "c")
    name = key_name(key_digest(b"b"))
    assert key_shares(config)[name] == 3.0
    assert "b" != name != key_name(key_digest(b"c"))
