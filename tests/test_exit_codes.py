"""Which end gives which exit code, and what is said of it."""

from __future__ import annotations

import pytest

from trioengine.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ProtocolError,
    TrioEngineError,
)
from trioengine.exit_codes import judge_end


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (ConfigError("no such model"), 2, "no such model"),
        (EngineDeadError("killed by SIGKILL"), 3, "killed by SIGKILL"),
        (EngineStartError("out of\n memory"), 4, "out of memory"),
        (ProtocolError("a gap"), 1, "a gap"),
        (TrioEngineError("odd"), 1, "odd"),
        (KeyError("x"), 1, "unexpected KeyError: 'x'"),
    ],
)
def test_ends(error: Exception, code: int, cause: str) -> None:
    assert judge_end(error) == (code, cause)
    assert judge_end(ExceptionGroup("g", [ExceptionGroup("g", [error])])) == (code, cause)


def test_what_we_raised_on_purpose_explains_the_rest() -> None:
    group = ExceptionGroup("g", [OSError("a socket was closed"), EngineDeadError("killed")])
    assert judge_end(group) == (3, "killed")
