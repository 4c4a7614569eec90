"""Splitting what a model thought from what it said. Pure.

Some models think aloud between ``<think>`` and ``</think>`` before they answer. The split is a
function of the text so far: whatever pieces it arrives in, the same characters come out on the same
side. White space around the two parts belongs to neither.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from trioengine.structured import THOUGHT_BEGIN, THOUGHT_END

__all__ = ["BEGIN", "END", "ReasoningSplitter", "Split", "is_open"]

BEGIN: Final = THOUGHT_BEGIN
END: Final = THOUGHT_END


class Split(NamedTuple):
    """Text of either side."""

    reasoning: str
    content: str


def is_open(text: str) -> bool:
    """True where ``text``, the last that a model reads, leaves it in the middle of a thought."""
    return text.rfind(BEGIN) > text.rfind(END)


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space, or what may yet become BEGIN
    BEFORE_REASONING = enum.auto()
    REASONING = enum.auto()
    BEFORE_CONTENT = enum.auto()
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Splits one reply.

    Args:
        inside: The prompt has begun the thought already, as some templates do.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state = _State.BEFORE_REASONING if inside else _State.START
        self._held = ""  # what the text to come decides about

    def feed(self, text: str) -> Split:
        """Take the next piece; return what is certain by now."""
        self._held += text
        if self._state is _State.START:
            self._begin()
        reasoning = self._reason() if self._state.value <= _State.REASONING.value else ""
        return Split(reasoning, self._speak())

    def flush(self) -> Split:
        """Return what was held back, at the end of the reply."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            return Split(held.rstrip(), "")
        return Split("", held if self._state is _State.START else "")

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(BEGIN):
            self._held = begun[len(BEGIN) :]
            self._state = _State.BEFORE_REASONING
        elif not BEGIN.startswith(begun):
            self._state = _State.CONTENT

    def _reason(self) -> str:
        if self._state is _State.BEFORE_REASONING:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.REASONING
        if self._state is not _State.REASONING:
            return ""
        reasoning, end, rest = self._held.partition(END)
        if end:
            self._state, self._held = _State.BEFORE_CONTENT, rest
            return reasoning.rstrip()
        certain = self._held[: len(self._held) - _length_of_beginning(self._held)].rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _speak(self) -> str:
        if self._state is _State.BEFORE_CONTENT:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.CONTENT
        if self._state is not _State.CONTENT:
            return ""
        content, self._held = self._held, ""
        return content


def _length_of_beginning(text: str) -> int:
    """Return the length of the longest end of ``text`` that may become ``END``."""
    return next(n for n in range(len(END) - 1, -1, -1) if text.endswith(END[:n]))
