"""What the ``decoder`` of a ``tokenizer.json`` makes of one token.

The tokenizers library runs each step of a decoder over the list of all tokens. A stream has no such
list; but every decoder of a generative model does the same to each token, whatever its neighbours,
except for bytes that only together are a character and for the start of the text. That is what
``TokenDecoder`` says; a decoder that does more is refused, since text must never be a guess.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["TokenDecoder", "byte_characters", "byte_level_decoder", "read_decoder"]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How one token becomes bytes, and what is special about the start of a text.

    Attributes:
        token_bytes: Bytes of a token within a text.
        first_text: Text of a token as the first of a text, where that can differ.
        leading_spaces: How many spaces the start of a text then loses.
        byte_fallback: Of bytes that are no character, each becomes one U+FFFD.
    """

    token_bytes: Callable[[str], bytes]
    first_text: Callable[[str], str] | None = None
    leading_spaces: int = 0
    byte_fallback: bool = False


def read_decoder(decoder: dict[str, Any] | None) -> TokenDecoder:
    """Understand the ``decoder`` of a ``tokenizer.json``.

    Raises:
        ConfigError: It is of a kind that no generative model has.
    """
    if decoder is None:  # the tokenizers library then joins tokens with spaces
        return TokenDecoder(lambda token: f" {token}".encode(), first_text=str)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return byte_level_decoder()
    reader = _StepReader()
    for step in steps:
        reader.read(step)
    return reader.decoder()


# Byte-level BPE ----------------------------------------------------------------------------------


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte.

    Source: Radford et al. 2019 (GPT-2), ``encoder.py``: printable Latin-1 stands for itself, the
    rest is moved past U+00FF in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


class _LatinOfCharacter(dict[int, str]):
    """For ``str.translate``: byte character to the Latin-1 character of that byte."""

    def __missing__(self, key: int) -> str:
        return "\u0100"  # not in Latin-1: the token has a character that stands for no byte


_LATIN: Final = _LatinOfCharacter(
    {ord(character): chr(byte) for byte, character in enumerate(byte_characters())}
)


def byte_level_decoder() -> TokenDecoder:
    """Return the decoder of byte-level BPE, the same for all of its vocabularies."""
    return TokenDecoder(_byte_level_bytes)


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:  # an added token with a plain space, say, stands for itself
        return token.encode()


# Sentencepiece -----------------------------------------------------------------------------------

_FALLBACK_BYTES: Final = {
    spelling: bytes([byte])
    for byte in range(256)
    for spelling in (f"<0x{byte:02X}>", f"<0x{byte:02x}>")
}


class _StepReader:
    """Collects the steps Replace or Metaspace, then ByteFallback, Fuse, Strip (each optional)."""

    def __init__(self) -> None:
        self._replacements: list[tuple[str, str]] = []
        self._first_replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._fused = False
        self._leading_spaces = 0

    def read(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "Replace" and not self._byte_fallback and "String" in step["pattern"]:
            self._replace(step["pattern"]["String"], step["content"], step["content"])
        elif kind == "Metaspace" and not self._byte_fallback:
            drop = step.get("prepend_scheme", "always") != "never"
            self._replace(step["replacement"], " ", "" if drop else " ")
        elif kind == "ByteFallback" and not self._fused:
            self._byte_fallback = True
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and self._fused and (step["content"], step["stop"]) == (" ", 0):
            self._leading_spaces = step["start"]
        else:
            raise ConfigError(f"its decoder has a step that cannot be done in a stream: {step}")

    def _replace(self, old: str, new: str, first: str) -> None:
        self._replacements.append((old, new))
        self._first_replacements.append((old, first))

    def decoder(self) -> TokenDecoder:
        usual, first = self._replacements, self._first_replacements
        known = _FALLBACK_BYTES if self._byte_fallback else {}

        def token_bytes(token: str) -> bytes:
            text = _replaced(token, usual)
            return known.get(text) or text.encode()

        def first_text(token: str) -> str:
            text = _replaced(token, first)
            return known[text].decode() if text in known else text

        return TokenDecoder(
            token_bytes,
            first_text if first != usual else None,
            self._leading_spaces,
            self._byte_fallback,
        )


def _replaced(text: str, replacements: Iterable[tuple[str, str]]) -> str:
    for old, new in replacements:
        text = text.replace(old, new)
    return text
