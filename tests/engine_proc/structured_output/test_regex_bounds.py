"""What a regular expression may ask for."""

from __future__ import annotations

import pytest

from trioengine.engine_proc.structured_output.regex_bounds import check_regex
from trioengine.errors import InvalidRequestError


@pytest.mark.parametrize(
    "pattern",
    ["", "a*?", "(?:ab){2,3}", "(?P<x>a)+", "[?*+]", r"\*\?", "(?i)yes", "a(?i)b", "(?i-s:a)?",
     "(?i-s)a*", "(?s).", "[(?i)]"],
)  # fmt: skip
def test_what_every_dialect_has_is_let_pass(pattern: str) -> None:
    check_regex(pattern, "regex")


@pytest.mark.parametrize(
    "pattern", ["foo**", "*a", "a|+", "(*a)", "(?i)*", "(?i)+a", "(a{200}){200}", "(" * 200]
)
def test_what_none_has_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_regex(pattern, "regex")
    assert caught.value.param == "regex"
