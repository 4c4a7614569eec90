"""Which field of a body that is no JSON is to blame, where that can be told. Pure.

Two mistakes leave a body readable for most parsers: numbers that are none (``NaN``, ``Infinity``),
and half a surrogate pair, which is no character. Clients with such a value in a variable are better
served with its name than with a position.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

__all__ = ["Culprit", "find_culprit"]

MAX_BYTES: Final = 65_536
"""Of longer bodies nothing is said: the search would hold up everybody else."""


class Culprit(NamedTuple):
    """A path, as ``param`` has it, and what is wrong there."""

    param: str
    reason: str


class _NotFinite(str):
    """What stood where a number should be."""

    __slots__ = ()


def find_culprit(data: bytes) -> Culprit | None:
    """Return the first value that JSON does not have, ``None`` if it is something else."""
    if len(data) > MAX_BYTES:
        return None
    try:
        body = json.loads(data, parse_constant=_NotFinite)
        return _search(body, "")
    except (ValueError, RecursionError):
        return None


def _search(value: Any, path: str) -> Culprit | None:
    if isinstance(value, _NotFinite):
        return Culprit(path, f"{value} is no JSON number")
    if isinstance(value, str):
        whole = value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
        return None if whole else Culprit(path, "half of a surrogate pair is no character")
    if isinstance(value, dict):
        inner = [(f"{path}.{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    else:
        return None
    return next((found for name, item in inner if (found := _search(item, name))), None)
