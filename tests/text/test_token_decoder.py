from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from trioengine.errors import ConfigError
from trioengine.text.token_decoder import byte_characters, read_decoder

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK = {"type": "ByteFallback"}
FUSE = {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def test_byte_characters_are_the_library_s_alphabet() -> None:
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_characters()[ord(" ")] == "Ġ"
    assert byte_characters()[ord("\n")] == "Ċ"


@pytest.mark.parametrize(
    ("token", "expected"),
    [("Ġfox", b" fox"), ("ðŁĺ", b"\xf0\x9f\x98"), ("é two words", "é two words".encode())],
)
def test_byte_level(token: str, expected: bytes) -> None:
    assert read_decoder({"type": "ByteLevel"}).token_bytes(token) == expected
    assert read_decoder(sequence({"type": "ByteLevel"})).token_bytes(token) == expected


def test_byte_fallback() -> None:
    decoder = read_decoder(sequence(REPLACE, FALLBACK, FUSE, STRIP))
    assert decoder.token_bytes("▁fox▁") == b" fox "
    assert decoder.token_bytes("<0xE2>") == b"\xe2"
    assert decoder.token_bytes("<0xe2>") == b"\xe2"
    assert decoder.token_bytes("<0xE2") == b"<0xE2"
    assert (decoder.leading_spaces, decoder.byte_fallback) == (1, True)
    assert decoder.first_text is None


def test_without_byte_fallback_a_byte_token_is_its_spelling() -> None:
    assert read_decoder(sequence(REPLACE, FUSE)).token_bytes("<0xE2>") == b"<0xE2>"


def test_metaspace() -> None:
    decoder = read_decoder(METASPACE)
    assert decoder.token_bytes("▁a▁b") == b" a b"
    assert decoder.first_text is not None
    assert decoder.first_text("▁a▁b") == "ab"
    assert read_decoder({**METASPACE, "prepend_scheme": "never"}).first_text is None


def test_metaspace_with_byte_fallback() -> None:
    decoder = read_decoder(sequence(METASPACE, FALLBACK, FUSE))
    assert decoder.token_bytes("<0x41>") == b"A"
    assert decoder.first_text is not None
    assert decoder.first_text("<0x41>") == "A"


def test_none_joins_with_spaces() -> None:
    decoder = read_decoder(None)
    assert decoder.first_text is not None
    assert (decoder.first_text("a"), decoder.token_bytes("b")) == ("a", b" b")


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        sequence({**REPLACE, "pattern": {"Regex": "x+"}}),
        sequence(FALLBACK, REPLACE),
        sequence(FALLBACK, METASPACE),
        sequence(FUSE, FALLBACK),
        sequence(REPLACE, STRIP),
        sequence(FUSE, {**STRIP, "stop": 1}),
        sequence({"type": "ByteLevel"}, FUSE, REPLACE),
    ],
)
def test_what_a_stream_cannot_do_is_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be done in a stream"):
        read_decoder(decoder)
