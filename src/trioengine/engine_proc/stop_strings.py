"""Finding stop strings in a text that arrives in pieces.

All stop strings of a sequence are one Aho-Corasick automaton. Its state after a character *is* the
longest end of the text that begins a stop string, which is what must be held back, no more; and the
first character on which a stop string is complete is the same however the text was cut.

Source: Aho and Corasick 1975, "Efficient string matching: an aid to bibliographic search".
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Final

__all__ = ["StopScanner"]

_ROOT: Final = 0


class _Automaton:
    """Immutable after construction, so sequences with the same stop strings share it.

    Attributes:
        children: By state, the next state by character.
        suffixes: By state, that of the longest proper end of its text.
        depths: By state, the length of its text.
        matches: By state, the longest stop string that its text ends with, or ``""``.
        first_characters: What any stop string begins with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.suffixes = [_ROOT]
        self.depths = [0]
        self.matches = [""]
        for stop in stops:
            self._insert(stop)
        self._link()
        self.first_characters = frozenset(self.children[_ROOT])

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for character in stop:
            if character not in self.children[state]:
                self.children[state][character] = len(self.children)
                self.children.append({})
                self.suffixes.append(_ROOT)
                self.depths.append(self.depths[state] + 1)
                self.matches.append("")
            state = self.children[state][character]
        self.matches[state] = stop

    def _link(self) -> None:
        """Set ``suffixes``, breadth first: those of shorter texts are needed for longer ones."""
        queue = deque(self.children[_ROOT].values())
        while queue:
            state = queue.popleft()
            for character, child in self.children[state].items():
                self.suffixes[child] = self.advance(self.suffixes[state], character)
                queue.append(child)
            self.matches[state] = self.matches[state] or self.matches[self.suffixes[state]]

    def advance(self, state: int, character: str) -> int:
        """Return the state after ``character``."""
        while (child := self.children[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = self.suffixes[state]
        return child

    def give_up(self, state: int) -> int:
        """Return the state for a match that does not count: what could still become another."""
        while state != _ROOT and not self.children[state]:
            state = self.suffixes[state]
        return state


_automaton = functools.lru_cache(maxsize=256)(_Automaton)


class StopScanner:
    """The text of one sequence on its way through the automaton.

    Args:
        stops: What ends it.
        included: Whether the one that does is part of the text.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self._automaton = _automaton(stops)
        self._included = included
        self._state = _ROOT
        self._held = ""

    def feed(self, text: str, *, armed: bool) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            text: Any length.
            armed: Whether a stop string that this piece completes counts.

        Returns:
            The text that is settled by now, and the stop string that ended it if one did.
        """
        automaton, state = self._automaton, self._state
        if state == _ROOT and automaton.first_characters.isdisjoint(text):
            return text, None
        for position, character in enumerate(text, 1):
            state = automaton.advance(state, character)
            if stop := automaton.matches[state]:
                if armed:
                    return self._cut(text[:position], stop), stop
                state = automaton.give_up(state)
        self._state = state
        text = self._held + text
        settled = len(text) - automaton.depths[state]
        self._held = text[settled:]
        return text[:settled], None

    def _cut(self, text: str, stop: str) -> str:
        text = self.flush() + text
        return text if self._included else text[: -len(stop)]

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        text, self._held, self._state = self._held, "", _ROOT
        return text
