"""The ways in which models spell tool calls, each a pure function of the text so far.

A format says what is certain by now: content that no call can begin in any more, and calls that
are complete. Both only ever grow as the text does, so what is streamed is the difference between
two looks, and any chunking of a text gives the same calls. What looked like a call and is none in
the end is content: nothing that a model wrote is lost.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    Format = Callable[[str, bool], "Reading"]

__all__ = ["FORMATS", "NEEDS_SPECIAL_TOKENS", "Call", "Format", "Reading", "detect_format"]

_WHITE: Final = " \t\r\n"
_HERMES_BEGIN: Final = "<tool_call>"
_HERMES_END: Final = "</tool_call>"
_MISTRAL_BEGIN: Final = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS: Final = "[ARGS]"
_PYTHON_TAG: Final = "<|python_tag|>"
_decoder: Final = json.JSONDecoder()


class Call(NamedTuple):
    """One call. ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """What is certain of a text so far."""

    content: str
    calls: tuple[Call, ...]


def hermes(text: str, final: bool) -> Reading:
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``: Hermes, Qwen, SmolLM."""
    content, at = "", 0
    calls: list[Call] = []
    while (begin := text.find(_HERMES_BEGIN, at)) >= 0:
        end = text.find(_HERMES_END, begin)
        if end < 0:
            rest = text[begin:] if final else ""
            return _reading(content, text[at:begin], calls, rest)
        found = _calls_in(text[begin + len(_HERMES_BEGIN) : end])
        end += len(_HERMES_END)
        if found:
            content += _spoken(text[at:begin])
            calls += found
        else:
            content += text[at:end]
        at = end
    tail = text[at:]
    if not final:
        tail = tail[: len(tail) - _length_of_beginning(tail, _HERMES_BEGIN)]
    return _reading(content, tail, calls)


def mistral(text: str, final: bool) -> Reading:
    """``[TOOL_CALLS] [{"name": …, "arguments": …}]``, or the newer ``[TOOL_CALLS]name{…}``."""
    begin = text.find(_MISTRAL_BEGIN)
    if begin < 0:
        if final:
            return Reading(text, ())
        held = _length_of_beginning(text, _MISTRAL_BEGIN)
        return _reading("", text[: len(text) - held], [])
    calls: list[Call] = []
    at = begin
    while text.startswith(_MISTRAL_BEGIN, at):
        found, end = _mistral_calls(text, at + len(_MISTRAL_BEGIN))
        if not found:
            break
        calls += found
        at = _skip(text, end, _WHITE)
    rest = text[at:] if final else ""
    return _reading("", text[:begin], calls, rest)


def plain_json(text: str, final: bool) -> Reading:
    """Nothing but ``{"name": …, "parameters": …}``, one or several: Llama 3, and plain JSON."""
    begin = _skip(text, 0, _WHITE)
    marked = text.startswith(_PYTHON_TAG, begin)
    if marked:
        begin = _skip(text, begin + len(_PYTHON_TAG), _WHITE)
    if begin == len(text) or (not marked and _PYTHON_TAG.startswith(text[begin:])):
        return Reading(text if final and not marked else "", ())
    if text[begin] not in "{[":
        return Reading(text, ())
    calls: list[Call] = []
    at = begin
    while at < len(text):
        value, end = _decode(text, at)
        found = _calls_of(value)
        if not found:
            break
        calls += found
        at = _skip(text, end, _WHITE + ";,")
    if final and at < len(text):
        return Reading(text[at:] if calls else text, tuple(calls))
    return Reading("", tuple(calls))


FORMATS: Final[dict[str, Format]] = {
    "hermes": hermes,
    "llama3_json": plain_json,
    "mistral": mistral,
    "json": plain_json,
}

NEEDS_SPECIAL_TOKENS: Final = frozenset({"mistral", "llama3_json"})
"""Formats whose marks are special tokens, which text does not have unless it is asked for."""


def detect_format(mentions: Callable[[str], bool]) -> str | None:
    """Return the format that a chat template teaches, ``None`` where it knows no tools.

    Args:
        mentions: Whether the template has this in it.
    """
    if not mentions("tools"):
        return None
    for mark, name in (
        (_HERMES_BEGIN, "hermes"),
        (_MISTRAL_BEGIN, "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("ipython", "llama3_json"),
    ):
        if mentions(mark):
            return name
    return "json"


# JSON --------------------------------------------------------------------------------------------


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``at`` and where it ends; ``None`` if there is none."""
    try:
        value: Any
        value, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return value, end


def _calls_in(text: str) -> list[Call]:
    """Return the calls that a text consists of; none if it has anything else."""
    value, end = _decode(text, _skip(text, 0, _WHITE))
    return _calls_of(value) if not text[end:].strip(_WHITE) else []


def _calls_of(value: Any) -> list[Call]:
    """Return the calls that a value spells: one, or a list of them; none if one of it is none."""
    entries = value if isinstance(value, list) else [value]
    calls = [call for call in map(_call_of, entries) if call is not None]
    return calls if len(calls) == len(entries) else []


def _call_of(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    if not value.keys() & {"arguments", "parameters"}:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models spell the object once more
        arguments, _ = _decode(arguments, 0)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _mistral_calls(text: str, at: int) -> tuple[list[Call], int]:
    at = _skip(text, at, _WHITE)
    if text.startswith(("[", "{"), at):
        value, end = _decode(text, at)
        return _calls_of(value), end
    begin = text.find("{", at)
    if begin < 0:
        return [], at
    name = text[at:begin].removesuffix(_MISTRAL_ARGUMENTS).strip(_WHITE)
    arguments, end = _decode(text, begin)
    if not name.replace("_", "").replace("-", "").isalnum() or not isinstance(arguments, dict):
        return [], at
    return [Call(name, json.dumps(arguments, ensure_ascii=False))], end


# Text --------------------------------------------------------------------------------------------


def _reading(content: str, stretch: str, calls: list[Call], rest: str = "") -> Reading:
    return Reading(content + (stretch if rest else _spoken(stretch)) + rest, tuple(calls))


def _spoken(stretch: str) -> str:
    """Return a stretch beside calls; white space alone is nothing said."""
    return stretch if stretch.strip(_WHITE) else ""


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _length_of_beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that may become ``mark``."""
    most = min(len(mark) - 1, len(text))
    return next(n for n in range(most, -1, -1) if text.endswith(mark[:n]))
