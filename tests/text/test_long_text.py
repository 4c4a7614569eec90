"""Text in pieces has the tokens of the whole, with any tokenizer, or is left in one piece."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import tiny_tokenizers
from trioengine.text import long_text
from trioengine.text.tokenizer import Tokenizer

PIECE = 64
WORDS = st.sampled_from(
    ["the", "Zug", "né", "x1", "12", "3", ".", "don't", "<|endoftext|>", "é two words", "漢字",
     "\n", "\n\n", "  ", " ", "\t", "_a", "a_", "😀", "ß", "-", "a" * 80]
)  # fmt: skip
TOKENIZERS = {name: Tokenizer(backend) for name, backend in tiny_tokenizers.of_every_kind().items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(words=st.lists(WORDS, max_size=60), glue=st.sampled_from(["", " "]))
def test_the_pieces_have_the_tokens_of_the_whole(name: str, words: list[str], glue: str) -> None:
    text = glue.join(words) * 4

    def encode(part: str) -> list[int]:
        return TOKENIZERS[name].encode(part, add_special_tokens=False)

    parts = list(long_text.pieces(text, encode, piece_chars=PIECE))
    assert "".join(parts) == text
    assert [token for part in parts for token in encode(part)] == encode(text)


def test_words_are_cut_into_pieces_of_the_length_wanted() -> None:
    encode = TOKENIZERS["byte_level"].encode
    parts = list(long_text.pieces("some words " * 1000, encode, piece_chars=PIECE))
    assert len(parts) > 100
    assert max(map(len, parts)) <= PIECE + len("some words ")


def test_what_has_no_words_stays_whole() -> None:
    text = "漢" * 1000
    assert list(long_text.pieces(text, lambda _: [0], piece_chars=PIECE)) == [text]


def test_a_tokenizer_that_marks_the_start_of_a_text_is_given_the_whole() -> None:
    text = "some words " * 100
    parts = long_text.pieces(text, lambda part: [1, len(part)], piece_chars=PIECE)
    assert list(parts) == [text]


def test_long_text_has_its_special_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    text = " ".join("".join(rng.choices("abcdeé", k=rng.randrange(1, 9))) for _ in range(500))
    for tokenizer in TOKENIZERS.values():
        whole = [tokenizer.encode(text, add_special_tokens=special) for special in (True, False)]
        with monkeypatch.context() as patch:
            patch.setattr(long_text, "PIECE_CHARS", PIECE)
            assert [tokenizer.encode(text, add_special_tokens=s) for s in (True, False)] == whole
