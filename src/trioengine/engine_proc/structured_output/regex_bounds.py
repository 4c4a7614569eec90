"""What a regular expression may ask for, found by reading it once from left to right.

The library compiles to derivatives, so nothing backtracks. Left are counted repetitions, whose
product is what their states are, nesting, and ``a**``, which it takes for ``(a*)*`` although it is
an error in every dialect that clients know.
"""

from __future__ import annotations

import re
from typing import Final

from trioengine.errors import InvalidRequestError

__all__ = ["MAX_NESTING", "MAX_REPETITIONS", "check_regex"]

MAX_NESTING: Final = 100
MAX_REPETITIONS: Final = 10_000

_TOKEN: Final = re.compile(
    r"\(\?[a-zA-Z]*(?:-[a-zA-Z]+)?\)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[^)(]{0,40}?[:>=!])?|\)"
    r"|\{\d*,?\d*\}|[*+?]|.",
    re.DOTALL,
)
_COUNT: Final = re.compile(r"\{(\d*),?(\d*)\}$")


def check_regex(pattern: str, param: str) -> None:
    """Refuse a pattern that is too deep, repeats too often, or has nothing to repeat.

    Raises:
        InvalidRequestError: It does.
    """
    weights = [1]  # of the open groups: the largest product of counts within each
    last_weight, last_kind = 1, "start"
    for match in _TOKEN.finditer(pattern):
        token = match[0]
        if token.startswith("(?") and token.endswith(")"):  # flags for what follows
            last_kind = "start"
            continue
        if token.startswith("(") and len(weights) > MAX_NESTING:
            raise _refusal(f"groups are nested more than {MAX_NESTING} deep", param)
        if token.startswith("("):
            weights.append(1)
            last_kind = "start"
        elif token == ")" and len(weights) > 1:
            last_weight, last_kind = weights.pop(), "atom"
            weights[-1] = max(weights[-1], last_weight)
        elif token in "*+?" or _COUNT.match(token):
            last_kind = _quantified(token, last_kind, pattern, match.start(), param)
            last_weight *= _count(token)
            weights[-1] = max(weights[-1], last_weight)
            if last_weight > MAX_REPETITIONS:
                raise _refusal(f"it repeats something more than {MAX_REPETITIONS} times", param)
        else:
            last_weight, last_kind = 1, "start" if token == "|" else "atom"


def _quantified(token: str, kind: str, pattern: str, at: int, param: str) -> str:
    """Return what a quantifier leaves behind: what may follow it."""
    if kind == "atom":
        return "quantified"
    if kind == "quantified" and token in "?+":  # lazy or possessive
        return "lazy"
    raise _refusal(f"nothing to repeat at position {at}: {pattern[at : at + 20]!r}", param)


def _count(token: str) -> int:
    match = _COUNT.match(token)
    if match is None:
        return 1
    digits = match[2] or match[1] or "1"
    return int(digits[:9])


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} cannot be used: invalid regular expression: {reason}", param=param
    )
