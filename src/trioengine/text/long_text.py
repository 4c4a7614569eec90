"""Where long text may be cut so that the tokens of its pieces are the tokens of the whole. Pure.

Most tokenizers split text into words before anything else, and a word takes its space with it. So a
cut before a space between two letters changes nothing, which is tried out on the text around it:
where a tokenizer works otherwise (one that marks the start of a text, say), no cut is made.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PIECE_CHARS", "pieces"]

PIECE_CHARS: Final = 262_144  # a few milliseconds to hand over
_LOOK_CHARS: Final = 4096  # for a place to cut, from where a piece is long enough
_AROUND_CHARS: Final = 256  # longer than any token of note
_BETWEEN_WORDS: Final = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def pieces(text: str, encode: Callable[[str], list[int]], *, piece_chars: int) -> Iterator[str]:
    """Yield ``text`` in pieces of about ``piece_chars``, or longer where it cannot be cut.

    Args:
        text: Of any length.
        encode: Returns token ids, without special tokens around them.
        piece_chars: How long a piece should be.
    """
    start = 0
    while len(text) - start > piece_chars:
        end = start + piece_chars
        while (cut := _place(text, end, encode)) is None and end + piece_chars < len(text):
            end += piece_chars
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _place(text: str, start: int, encode: Callable[[str], list[int]]) -> int | None:
    """Return where to cut at ``start`` or soon after it; ``None`` for nowhere."""
    found = _BETWEEN_WORDS.search(text, start, start + _LOOK_CHARS)
    if found is None:
        return None
    cut = found.start()
    before, after = text[max(0, cut - _AROUND_CHARS) : cut], text[cut : cut + _AROUND_CHARS]
    return cut if encode(before + after) == encode(before) + encode(after) else None
