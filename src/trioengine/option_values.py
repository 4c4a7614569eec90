"""The text, or TOML value, of an option → its value. Pure, but for a chat template's file."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final, Literal

import msgspec

from trioengine.api_keys import read_key_lines
from trioengine.errors import ConfigError
from trioengine.fault_plan import FaultPlan, decode_plan

__all__ = ["READERS", "Kind", "is_blank"]

ALLOW_FAULTS: Final = "TRIOENGINE_ALLOW_FAULTS"
Kind = Literal["text", "integer", "number", "switch", "list", "json", "template", "keys", "faults"]


def is_blank(raw: object) -> bool:
    """True for a text that says nothing, as a shell writes for a variable that is not set."""
    return isinstance(raw, str) and not raw.strip()


def _read_text(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"must be text, got {raw!r}")
    return raw


def _read_integer(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise TypeError(f"must be a whole number, got {raw!r}")
    try:
        return int(raw)
    except ValueError:
        raise ValueError(f"must be a whole number, got {raw!r}") from None


def _read_number(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise TypeError(f"must be a number, got {raw!r}")
    try:
        return float(raw)
    except ValueError:
        raise ValueError(f"must be a number, got {raw!r}") from None


def _read_switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise ValueError(f"must be true or false, got {raw!r}")


def _read_list(raw: object) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, list):
        raise TypeError(f"must be a list of texts, got {raw!r}")
    # An empty entry is a variable that somebody forgot to set: for a key that would open the doors.
    if any(is_blank(part) for part in parts):
        raise ValueError(f"must not have empty entries, got {raw!r}")
    return tuple(_read_text(part).strip() for part in parts)


def _read_json(raw: object) -> dict[str, str | int | float | bool]:
    scalars = dict[str, str | int | float | bool]
    if isinstance(raw, str):
        return msgspec.json.decode(raw, type=scalars)
    return msgspec.convert(raw, type=scalars)


def _read_template(raw: object) -> str:
    """Return a chat template given as such or as the path of a file that holds it; it compiles."""
    from trioengine.text.chat_template import ChatTemplate  # jinja2 is for those who need it

    text = _read_text(raw)
    source = text if "{" in text else Path(text).read_text(encoding="utf-8")
    try:
        ChatTemplate(source)
    except ConfigError as error:
        raise ValueError(error.message) from error
    return source


def _read_keys(raw: object) -> dict[str, float]:
    """Return what the file named ``raw`` holds: API keys and their weights."""
    return dict(read_key_lines(Path(_read_text(raw)).read_text(encoding="utf-8")))


def _read_faults(raw: object) -> FaultPlan:
    """Return the fault plan in the file named ``raw``; refused unless faults are allowed."""
    if os.environ.get(ALLOW_FAULTS) != "1":
        raise ValueError(f"faults on purpose are not allowed here: {ALLOW_FAULTS} is not 1")
    path = Path(_read_text(raw))
    decode = msgspec.json.decode if path.suffix == ".json" else tomllib.loads
    try:
        return decode_plan(path.read_text(encoding="utf-8"), decode)
    except ConfigError as error:
        raise ValueError(error.message) from error


# A reader raises ValueError, TypeError, OSError or MsgspecError for what it cannot use.
READERS: Final = {
    "text": _read_text,
    "integer": _read_integer,
    "number": _read_number,
    "switch": _read_switch,
    "list": _read_list,
    "json": _read_json,
    "template": _read_template,
    "keys": _read_keys,
    "faults": _read_faults,
}
