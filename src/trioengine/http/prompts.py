"""The ``prompt`` of a completion: text, token ids, or a list of either, taken apart in bounds.

A body of 16 MiB may hold millions of ids. What can't fit is refused by counting commas, before an
object is made for each; the rest is decoded prompt by prompt, so that the caller may pause between.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from trioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgspec import Raw

__all__ = [
    "MAX_IDS",
    "MAX_PROMPTS",
    "Prompt",
    "check_text_length",
    "check_token_range",
    "context_length_exceeded",
    "read_prompts",
]

Prompt = str | list[int]
Value = TypeVar("Value")

MAX_IDS: Final = 262_144  # of one prompt that is to be cut, or looked at without a limit
MAX_PROMPTS: Final = 2048
_MAX_TOKEN_CHARS: Final = 256  # no vocabulary of note has a longer token (the longest: 128)

_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[int])


def read_prompts(
    raw: Raw, *, max_model_len: int, vocab_size: int, param: str = "prompt"
) -> Iterator[Prompt]:
    """Yield each prompt in order; token ids are checked to be in ``[0, vocab_size)``.

    Args:
        raw: The undecoded value, already known to be JSON.
        max_model_len: Tokens that one sequence can hold; a list of ids beyond is refused unread.
        vocab_size: Of the model.
        param: The field's name, for errors.

    Raises:
        InvalidRequestError: Neither text nor ids nor a list of either, none, too many or too long.
    """
    yield from _Reader(max_model_len, vocab_size, param).read(bytes(raw).strip())


def context_length_exceeded(
    limit: int, prompt_tokens: int, requested: int, *, param: str
) -> InvalidRequestError:
    """Return the error with its three numbers, all in tokens."""
    return InvalidRequestError(
        f"This model's maximum context length is {limit} tokens. However, the prompt has "
        f"{prompt_tokens} tokens and at least {requested} more were requested for the output "
        f"({prompt_tokens + requested} in total). Shorten the prompt or request fewer tokens.",
        param=param,
        code="context_length_exceeded",
    )


def check_text_length(num_chars: int, max_model_len: int, *, param: str) -> None:
    """Refuse text that can't fit whatever its tokens are, before time is spent on finding out.

    Raises:
        InvalidRequestError: It has more characters than ``max_model_len`` tokens can spell.
    """
    least = num_chars // _MAX_TOKEN_CHARS
    if least > max_model_len:
        raise context_length_exceeded(max_model_len, least, 1, param=param)


def check_token_range(ids: list[int], vocab_size: int, *, param: str) -> None:
    """Refuse ids that are no tokens of the model. ``ids`` is not empty.

    Raises:
        InvalidRequestError: One is outside of ``[0, vocab_size)``.
    """
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"Token ids must be in [0, {vocab_size}), got {wrong}.", param=param
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Takes one field apart; see ``read_prompts``."""

    max_model_len: int
    vocab_size: int
    param: str

    def read(self, data: bytes) -> Iterator[Prompt]:
        if not data or data == b"null":
            raise self._refusal("is required.")
        if not data.startswith(b"["):
            yield self._decode(_text, data)
            return
        first = data[1:].lstrip()[:1]
        if first == b"]":
            raise self._refusal("must not be an empty list.")
        if first == b'"':
            texts = self._decode(_texts, data)
            self._check_count(len(texts))
            yield from texts
        elif first == b"[":
            yield from self._read_id_lists(data)
        else:
            yield self._read_ids(data)

    def _read_id_lists(self, data: bytes) -> Iterator[list[int]]:
        # JSON that begins with "[[" and holds nothing but numbers ends each list at a "]"; where it
        # holds anything else, a piece below is no list of integers and is refused for that.
        self._check_count(data.count(b"]") - 1)
        pieces = data[1:-1].strip().split(b"]")
        if pieces.pop().strip():
            raise self._mixed()
        for number, piece in enumerate(pieces):
            piece = piece.strip().removeprefix(b",") if number else piece
            yield self._read_ids(piece + b"]")

    def _read_ids(self, data: bytes) -> list[int]:
        least = data.count(b",") + 1
        if least > self.max_model_len:
            raise context_length_exceeded(self.max_model_len, least, 1, param=self.param)
        ids = self._decode(_ids, data)
        if not ids:
            raise self._refusal("must have at least one token in each list.")
        check_token_range(ids, self.vocab_size, param=self.param)
        return ids

    def _check_count(self, count: int) -> None:
        if count > MAX_PROMPTS:
            raise self._refusal(f"takes at most {MAX_PROMPTS} entries, got {count}.")

    def _decode(self, decoder: msgspec.json.Decoder[Value], data: bytes) -> Value:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            raise self._mixed() from None

    def _mixed(self) -> InvalidRequestError:
        return self._refusal(
            "must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids."
        )

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"'{self.param}' {what}", param=self.param)
