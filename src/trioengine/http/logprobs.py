"""What the model thought of each token, in the shapes that OpenAI and vLLM gave it. Pure.

A token is called by its own text, special tokens by their names; a token that is only a part of a
character reads as U+FFFD, and only its bytes (chat) or its id tell it from others of its kind.
"""

from __future__ import annotations

import codecs
import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from trioengine.outputs import LEAST_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioengine.outputs import TokenLogprob
    from trioengine.text.vocabulary import Vocabulary

__all__ = [
    "ChatLogprobs",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "CompletionLogprobs",
    "PromptLogprob",
    "TextOffsets",
    "TokenNames",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
    "prompt_offsets",
]


class ChatTopLogprob(msgspec.Struct):
    """A token that could have come. ``bytes`` is null for a token that stands for none."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """A token that came, and those that were likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """``logprobs`` of a chat choice, or of a stretch of one."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """``logprobs`` of a completion choice, or of a stretch of one: one entry a token in each list.

    ``text_offset`` counts characters of the returned text. Of a prompt's first token, which nothing
    foretells, the logprobs are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """vLLM's entry of ``prompt_logprobs``, under the token's id."""

    logprob: float
    rank: int
    decoded_token: str


class TokenNames:
    """What tokens are called.

    Args:
        vocabulary: Of the model.
        as_ids: Call them ``token_id:N``, which is never ambiguous.
    """

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return what a client sees."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return the token's own text; of a row of the model past the vocabulary's end, none."""
        if text := self._vocabulary.texts.get(token_id):  # most are; a special token's is empty
            return text
        return (self.spelling(token_id) or b"").decode("utf-8", "replace")

    def spelling(self, token_id: int) -> bytes | None:
        """Return the bytes that the token stands for."""
        try:
            return self._vocabulary.token_bytes(token_id)
        except KeyError:
            return None

    def is_special(self, token_id: int) -> bool:
        """True for a token that is no text, and has a name instead."""
        return token_id in self._vocabulary.special_texts


class TextOffsets:
    """Where in the text each token begins, counted as the tokens come.

    A token that goes on with a character begins where that character does.

    Args:
        names: Of the tokens.
        start: Offset of the first.
        skip_special_tokens: Special tokens are no part of the text.
    """

    def __init__(self, names: TokenNames, start: int = 0, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.end = start

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.end)
            if not (self._skip_special and self._names.is_special(token_id)):
                self.end += len(self._decoder.decode(self._names.spelling(token_id) or b""))
        return offsets


def prompt_offsets(names: TokenNames, token_ids: Sequence[int], length: int) -> list[int]:
    """Return where in a prompt of ``length`` characters each of its tokens begins.

    What a tokenizer puts in front (a token that begins a text, a space) is no part of the text: the
    tokens that stand for it begin at 0.
    """
    offsets = TextOffsets(names, skip_special_tokens=False)
    starts = offsets.take(token_ids)
    in_front = max(0, offsets.end - length)
    return [max(0, start - in_front) for start in starts]


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprob], num_top: int) -> ChatLogprobs:
    """Return these tokens in the chat schema, each with exactly ``num_top`` alternatives."""
    return ChatLogprobs([_chat_entry(names, entry, num_top) for entry in entries])


def completion_logprobs(
    names: TokenNames,
    entries: Sequence[TokenLogprob | None],
    token_ids: Iterable[int],
    offsets: list[int],
    num_top: int,
) -> CompletionLogprobs:
    """Return these tokens in the completions schema.

    Args:
        names: Of the tokens.
        entries: ``None`` for a prompt's first token.
        token_ids: Of the same tokens.
        offsets: Of the same tokens.
        num_top: So many of the likeliest, and the token itself where it is not one of them.
    """
    return CompletionLogprobs(
        tokens=[names.name(token_id) for token_id in token_ids],
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(names, entry, num_top) for entry in entries],
        text_offset=offsets,
    )


def prompt_logprobs(
    names: TokenNames, entries: Iterable[TokenLogprob | None], num_top: int
) -> list[dict[int, PromptLogprob] | None]:
    """Return a prompt's tokens in vLLM's shape: by id, the token itself first."""
    return [None if entry is None else _by_id(names, entry, num_top) for entry in entries]


def _by_id(names: TokenNames, entry: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(top_id, top, rank) for rank, (top_id, top) in enumerate(entry.top[:num_top], 1)]
    by_id: dict[int, PromptLogprob] = {}
    for token_id, logprob, rank in ranked:
        if token_id not in by_id:
            by_id[token_id] = PromptLogprob(_finite(logprob), rank, names.text(token_id))
    return by_id


def _chat_entry(names: TokenNames, entry: TokenLogprob, num_top: int) -> ChatTokenLogprob:
    top = [
        ChatTopLogprob(names.name(top_id), _finite(logprob), _bytes(names, top_id))
        for top_id, logprob in entry.top[:num_top]
    ]
    name = names.name(entry.token_id)
    return ChatTokenLogprob(name, _finite(entry.logprob), _bytes(names, entry.token_id), top)


def _top(names: TokenNames, entry: TokenLogprob | None, num_top: int) -> dict[str, float] | None:
    """Return the likeliest by name. Of several of one name the likeliest is kept."""
    if entry is None:
        return None
    top: dict[str, float] = {}
    own = (entry.token_id, entry.logprob)
    for token_id, logprob in itertools.chain(entry.top[:num_top], (own,)):
        top.setdefault(names.name(token_id), _finite(logprob))
    return top


def _bytes(names: TokenNames, token_id: int) -> list[int] | None:
    spelling = names.spelling(token_id)
    return None if spelling is None else list(spelling)


def _finite(logprob: float) -> float:
    """Return ``logprob`` as JSON can have it."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
