"""Token ids to bytes and text, once per process, without a tokenizer library.

Most tokens are whole characters; their text is worked out here, and a detokeniser joins it as it
is. The others are byte fragments that only their neighbours complete.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioengine.errors import ConfigError
from trioengine.text.token_decoder import (
    TokenDecoder,
    byte_characters,
    byte_level_decoder,
    read_decoder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SIMULATED_EOS_ID", "Vocabulary", "simulated_tokens"]

SIMULATED_EOS_ID: Final = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Immutable; shared by every detokeniser of a process.

    Attributes:
        size: Ids are in [0, size). A model may have more rows than that: they have no text.
        texts: Text of each token that is whole characters; special tokens are ``""``.
        fragments: Bytes of each token that is not.
        special_texts: What each special token is called. It is no part of the text.
        first_texts: Text of a token that reads differently as the first of a text.
        leading_spaces: How many spaces the start of a text loses.
        byte_fallback: Where bytes are no character, one U+FFFD stands for each of them; otherwise
            one for each maximal prefix of a character (as ``bytes.decode`` does).
    """

    size: int
    texts: Mapping[int, str]
    fragments: Mapping[int, bytes]
    special_texts: Mapping[int, str]
    first_texts: Mapping[int, str]
    leading_spaces: int
    byte_fallback: bool

    @classmethod
    def from_dir(cls, model_dir: Path) -> Vocabulary:
        """Read ``tokenizer.json``; under 0.1 s for 49,152 tokens.

        Raises:
            ConfigError: There is none, or its decoder is of a kind that no generative model has.
        """
        path = model_dir / "tokenizer.json"
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, ConfigError) as error:
            raise ConfigError(f"{path} cannot be used: {error}") from error

    @classmethod
    def from_json(cls, data: bytes) -> Vocabulary:
        """Read the content of a ``tokenizer.json``.

        Raises:
            ConfigError: The decoder is of a kind that no generative model has.
            msgspec.MsgspecError: This is not a tokenizer.
        """
        file = msgspec.json.decode(data, type=_TokenizerFile)
        vocab = file.model.vocab
        if isinstance(vocab, dict):
            tokens = {index: token for token, index in vocab.items()}
        else:
            tokens = {index: token for index, (token, _) in enumerate(vocab)}
        tokens |= {added.id: added.content for added in file.added_tokens}
        special = {added.content for added in file.added_tokens if added.special}
        return _build(tokens, special, read_decoder(file.decoder))

    @classmethod
    def simulated(cls, size: int) -> Vocabulary:
        """Return the vocabulary of the simulated engine; ``Tokenizer.simulated`` is its twin.

        Raises:
            ValueError: ``size`` leaves no room for the 256 bytes.
        """
        tokens = dict(enumerate(simulated_tokens(size)))
        return _build(tokens, {tokens[SIMULATED_EOS_ID]}, byte_level_decoder())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for inside a text; of a special token, its name.

        Raises:
            KeyError: There is no such token.
        """
        if (fragment := self.fragments.get(token_id)) is not None:
            return fragment
        if (name := self.special_texts.get(token_id)) is not None:
            return name.encode()
        return self.texts[token_id].encode()


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    """The parts that decoding needs; merges and the rest are skipped, not built."""

    model: _Model
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


def _build(tokens: Mapping[int, str], special: set[str], decoder: TokenDecoder) -> Vocabulary:
    texts: dict[int, str] = {}
    fragments: dict[int, bytes] = {}
    special_texts: dict[int, str] = {}
    first_texts: dict[int, str] = {}
    token_bytes, first_text = decoder.token_bytes, decoder.first_text
    for token_id, token in tokens.items():
        if token in special:
            special_texts[token_id], texts[token_id] = token, ""
            continue
        raw = token_bytes(token)
        try:
            texts[token_id] = text = raw.decode()
        except UnicodeDecodeError:
            fragments[token_id] = raw
            continue
        if first_text is not None and (first := first_text(token)) != text:
            first_texts[token_id] = first
    return Vocabulary(
        size=max(tokens, default=-1) + 1,
        texts=texts,
        fragments=fragments,
        special_texts=special_texts,
        first_texts=first_texts,
        leading_spaces=decoder.leading_spaces,
        byte_fallback=decoder.byte_fallback,
    )


# The simulated engine's words --------------------------------------------------------------------


def simulated_tokens(size: int) -> list[str]:
    """Return the tokens of the simulated engine by id, written as byte-level BPE writes them.

    Id 0 ends a sequence, then come the 256 bytes (so that any text can be encoded), then words such
    as `` bado`` that make simulated text readable.

    Raises:
        ValueError: ``size`` leaves no room for the 256 bytes.
    """
    fixed = ["<|endoftext|>", *byte_characters()]
    if size < len(fixed):
        raise ValueError(f"a simulated vocabulary has at least {len(fixed)} tokens, not {size}")
    space = byte_characters()[ord(" ")]
    return fixed + [space + _word(index) for index in range(size - len(fixed))]


_SYLLABLES: Final = [c + v for c, v in itertools.product("bdfgklmnprstvz", "aeiou")]


def _word(index: int) -> str:
    """Return a word for ``index``; never the same one for two of them."""
    index += len(_SYLLABLES)  # two syllables at least
    word = ""
    while index:
        index, digit = divmod(index, len(_SYLLABLES))
        word = _SYLLABLES[digit] + word
    return word
