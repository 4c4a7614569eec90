"""Tokens of one sequence to text, as they come.

Theory of operation
-------------------
A token that is whole characters goes straight through. A fragment waits until its character is
complete, or can no longer become one; what is still incomplete at the real end of the sequence
becomes U+FFFD. Then, where there are stop strings, the one that is complete first ends the text,
whichever tokens brought it; it is no part of the text unless asked for, and whatever may yet turn
out to begin one is held back. Chunking carries no meaning: the joined text is that of all tokens at
once.

That text is the tokenizers library's own ``decode``, with special tokens or without, to the letter
for byte-level BPE. With byte fallback there is one difference, on purpose: the library turns a
whole run of byte tokens into U+FFFD if any of it is no UTF-8, so that no character of a run would
be certain, and no stop string such as a newline seen, before the run is over. Here the good
characters of a bad run survive.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final, NamedTuple

from trioengine.engine_proc.stop_strings import StopScanner
from trioengine.errors import InternalError
from trioengine.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DetokenizedDelta", "Detokenizer", "DetokenizerVocab", "simulated_vocab"]

DetokenizerVocab = Vocabulary
simulated_vocab = Vocabulary.simulated

_EACH_BYTE: Final = "trioengine.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class DetokenizedDelta(NamedTuple):
    """What some tokens added to the text.

    Attributes:
        text: New text; empty while bytes or a possible stop string are held back.
        stop_string: The stop string that ended the text, if one did.
        num_tokens: How many of the tokens were used; fewer than given only with a stop string,
            which was complete with the last of them.
    """

    text: str
    stop_string: str | None
    num_tokens: int


class Detokenizer:
    """The text of one sequence. Give it output tokens only.

    Args:
        vocab: Shared by all sequences.
        stop: Strings that end the text.
        min_tokens: A stop string that is complete before this many tokens does not count.
        include_stop: The stop string that ended the text is part of it.
        skip_special_tokens: Special tokens are no part of the text.
        continues_prompt: The text goes on behind a prompt, so that a sentencepiece vocabulary's
            first space belongs to it ("… is" + " Paris"). Otherwise it reads as ``decode`` of the
            output alone, which drops it.
    """

    __slots__ = (
        "_errors",
        "_first",
        "_leading_spaces",
        "_min_tokens",
        "_num_tokens",
        "_pending",
        "_plain",
        "_scanner",
        "_skips_special",
        "_texts",
        "_vocab",
    )

    def __init__(
        self,
        vocab: DetokenizerVocab,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        continues_prompt: bool = False,
    ) -> None:
        self._vocab = vocab
        self._texts = vocab.texts
        self._errors = _EACH_BYTE if vocab.byte_fallback else "replace"
        self._scanner = StopScanner(stop, included=include_stop) if stop else None
        self._skips_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = b""  # an incomplete character
        self._first = bool(vocab.first_texts) and not continues_prompt
        self._leading_spaces = 0 if continues_prompt else vocab.leading_spaces
        self._plain = not self._first and not self._leading_spaces

    def append(self, token_ids: Sequence[int]) -> DetokenizedDelta:
        """Take the next output tokens.

        Raises:
            InternalError: An id is negative: this sequence's fault alone.
        """
        if self._scanner is not None:
            return self._append_scanned(token_ids, self._scanner)
        if len(token_ids) == 1:
            return DetokenizedDelta(self._text(token_ids[0]), None, 1)
        return DetokenizedDelta("".join(map(self._text, token_ids)), None, len(token_ids))

    def _append_scanned(self, token_ids: Sequence[int], scanner: StopScanner) -> DetokenizedDelta:
        settled = []
        for used, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            armed = self._num_tokens >= self._min_tokens
            text, stop = scanner.feed(self._text(token_id), armed=armed)
            settled.append(text)
            if stop is not None:
                self._pending = b""  # whatever this token began after it is no part of the text
                return DetokenizedDelta("".join(settled), stop, used)
        return DetokenizedDelta("".join(settled), None, len(token_ids))

    def flush(self) -> str:
        """Return what was held back, at the real end of the sequence."""
        held = self._scanner.flush() if self._scanner is not None else ""
        tail, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return held + tail

    def _text(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if self._plain and (text := self._texts.get(token_id)):
            return text
        return self._text_beside_others(token_id)

    def _text_beside_others(self, token_id: int) -> str:
        raw = self._raw(token_id)
        if raw is None:
            return ""
        data = self._pending + raw
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        if self._leading_spaces and text:
            text = self._without_leading_spaces(text)
        self._plain = not (self._pending or self._leading_spaces)
        return text

    def _raw(self, token_id: int) -> bytes | None:
        """Return the token's bytes; none for a token that is not there as far as text goes."""
        vocab = self._vocab
        raw = vocab.fragments.get(token_id)
        if raw is None:
            text = vocab.texts.get(token_id)
            if text is None:
                if token_id < 0:
                    raise InternalError(f"token id {token_id} is negative")
                return None  # a row of the model past the vocabulary's end
            if (name := vocab.special_texts.get(token_id)) is not None:
                return None if self._skips_special else name.encode()
            raw = (vocab.first_texts.get(token_id, text) if self._first else text).encode()
        self._first = False
        return raw

    def _without_leading_spaces(self, text: str) -> str:
        while self._leading_spaces and text.startswith(" "):
            text = text[1:]
            self._leading_spaces -= 1
        if text:
            self._leading_spaces = 0
        return text
