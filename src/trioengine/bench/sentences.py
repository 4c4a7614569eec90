"""English sentences from a seed: varied enough to be text, and the same on every machine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["sentences"]

_WHO: Final = (
    *("the ferry pilot", "a beekeeper", "our oldest cousin", "the town clerk", "every apprentice"),
    *("the mountain guide", "a patient teacher", "the second violinist", "my landlord"),
    *("the glass blower", "a lost tourist", "the fishing fleet", "the librarian", "a quiet monk"),
    *("the weather office", "an honest thief", "the new surgeon", "the village band"),
    *("a tired courier", "the clockmaker", "some engineers", "the tall stranger"),
)
_DID: Final = (
    *("found", "lost", "mended", "weighed", "praised", "copied", "buried", "traded", "polished"),
    *("forgot", "drew", "doubted", "counted", "delivered", "returned", "kept", "tested", "named"),
    *("opened", "moved", "saved", "compared"),
)
_WHAT: Final = (
    *("a silver compass", "the spare engine", "seven crates of tea", "an old ledger"),
    *("the plans of the tunnel", "a wooden bridge", "the bell of the chapel", "a bag of seeds"),
    *("the longest letter", "a jar of buttons", "the rules of the game", "two hundred bricks"),
    *("a portrait of the queen", "the recipe for plum jam", "a broken radio", "the harvest song"),
    *("an unfinished novel", "the frozen canal", "a theory of colour", "the missing key"),
)
_WHEN: Final = (
    *("before breakfast", "on the last day of winter", "without a word", "for a small fee"),
    *("during the long strike", "in front of the judges", "while the tide was out"),
    *("with great care", "after the second flood", "behind the market hall", "by pure accident"),
    *("as soon as the snow melted", "against all advice", "under a borrowed name"),
    *("between two trains", "to win a bet", "in less than an hour"),
)
_THEN: Final = (
    *("Few people noticed.", "It took the whole summer.", "Nothing was the same afterwards."),
    *("The reason is still unknown.", "That was only the beginning.", "Everyone went home early."),
    *("A report was written.", "It has happened twice since.", "The neighbours approved."),
)


def sentences(seed: str) -> Iterator[str]:
    """Yield sentences for ever; the same ones for the same seed, on any version of Python.

    ``random()`` is the one method whose sequence the standard library promises to keep; a seed
    that is text is hashed with SHA-512.
    """
    source = random.Random(seed)

    def pick(choices: Sequence[str]) -> str:
        return choices[int(source.random() * len(choices))]

    while True:
        text = f"{pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHEN)}."
        text = text[0].upper() + text[1:]
        yield f"{text} {pick(_THEN)}" if source.random() < 0.4 else text
