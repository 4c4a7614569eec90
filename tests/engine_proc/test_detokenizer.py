from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from helpers import tiny_tokenizers
from helpers.tiny_tokenizers import ids_of
from trioengine.engine_proc.detokenizer import Detokenizer, DetokenizerVocab, simulated_vocab
from trioengine.errors import InternalError
from trioengine.text.token_decoder import byte_characters

if TYPE_CHECKING:
    import tokenizers


def vocab_of(tokenizer: tokenizers.Tokenizer) -> DetokenizerVocab:
    return DetokenizerVocab.from_json(tokenizer.to_str().encode())


@pytest.fixture(scope="module")
def byte_level() -> tokenizers.Tokenizer:
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    return tiny_tokenizers.byte_fallback()


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.append([token_id]).text for token_id in ids]


@pytest.mark.parametrize("text", ["😀", "ď", "日本", "👩\u200d👩\u200d👧"])
def test_a_character_split_over_tokens_comes_out_whole_and_at_once(
    byte_level: tokenizers.Tokenizer, text: str
) -> None:
    a_token_per_byte = ids_of(byte_level, *(byte_characters()[b] for b in text.encode()))
    texts = deltas(Detokenizer(vocab_of(byte_level)), a_token_per_byte)
    # Each character comes with its own last byte: not in part before, and not later.
    expected = [t for c in text for t in [*[""] * (len(c.encode()) - 1), c]]
    assert texts == expected


def test_bytes_that_can_no_longer_be_a_character_do_not_wait_for_the_end(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    ids = ids_of(byte_fallback, "<0xF0>", "<0x9F>", "x")
    assert deltas(Detokenizer(vocab_of(byte_fallback)), ids) == ["", "", "\ufffd\ufffdx"]


def test_an_incomplete_character_is_replaced_at_the_real_end_only(
    byte_level: tokenizers.Tokenizer,
) -> None:
    ids = ids_of(byte_level, *"ðŁĺ")
    detokenizer = Detokenizer(vocab_of(byte_level))
    assert deltas(detokenizer, ids) == ["", "", ""]
    assert detokenizer.flush() == byte_level.decode(ids) == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_special_token_between_two_bytes_of_a_character_is_no_part_of_it(
    byte_level: tokenizers.Tokenizer,
) -> None:
    ids = ids_of(byte_level, "Ã", "<|im_end|>", "©")
    assert deltas(Detokenizer(vocab_of(byte_level)), ids) == ["", "", "é"]


def test_the_good_characters_of_a_bad_run_of_bytes_survive(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    tokens = ("<0x0A>", "<0xC3>", "<0xA9>", "<0xFF>")
    ids = ids_of(byte_fallback, *tokens)
    assert deltas(Detokenizer(vocab_of(byte_fallback)), ids) == ["\n", "", "é", "\ufffd"]


def test_a_newline_written_as_a_byte_stops_in_its_own_step(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    detokenizer = Detokenizer(vocab_of(byte_fallback), stop=("\n",))
    assert detokenizer.append(ids_of(byte_fallback, "<0x0A>")) == ("", "\n", 1)


def test_the_first_space_of_sentencepiece(byte_fallback: tokenizers.Tokenizer) -> None:
    vocab = vocab_of(byte_fallback)
    ids = ids_of(byte_fallback, "<s>", "▁The", "▁fox")
    assert deltas(Detokenizer(vocab), ids) == ["", "The", " fox"]
    assert deltas(Detokenizer(vocab, continues_prompt=True), ids) == ["", " The", " fox"]


def test_a_token_that_is_only_the_first_space(byte_fallback: tokenizers.Tokenizer) -> None:
    ids = ids_of(byte_fallback, "▁", "▁", "x")
    assert deltas(Detokenizer(vocab_of(byte_fallback)), ids) == ["", " ", "x"]


def test_stop_string_over_tokens_is_held_back_and_cut(byte_fallback: tokenizers.Tokenizer) -> None:
    detokenizer = Detokenizer(vocab_of(byte_fallback), stop=("xstop",))
    ids = ids_of(byte_fallback, "▁fox", "x", "st", "op", "x")
    # "fox" ends with an x that may begin the stop string; the next x shows that it did not.
    assert deltas(detokenizer, ids[:3]) == ["fo", "x", ""]
    assert detokenizer.append(ids[3:]) == ("", "xstop", 1)
    assert detokenizer.flush() == ""


def test_a_stop_string_may_be_part_of_the_text(byte_fallback: tokenizers.Tokenizer) -> None:
    detokenizer = Detokenizer(vocab_of(byte_fallback), stop=("xst",), include_stop=True)
    ids = ids_of(byte_fallback, "▁fox", "x", "st", "op")
    assert deltas(detokenizer, ids[:2]) == ["fo", "x"]
    assert detokenizer.append(ids[2:]) == ("xst", "xst", 1)
    assert detokenizer.flush() == ""


def test_what_a_stop_string_held_back_is_text_where_the_end_comes_first(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    detokenizer = Detokenizer(vocab_of(byte_fallback), stop=("stop",))
    assert detokenizer.append(ids_of(byte_fallback, "st")).text == ""
    assert detokenizer.append(ids_of(byte_fallback, "<0xE2>")).text == ""
    assert detokenizer.flush() == "st\ufffd"


def test_min_tokens_counts_the_token_that_completes_the_stop_string(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    vocab = vocab_of(byte_fallback)
    ids = ids_of(byte_fallback, "x") * 5
    texts = {
        min_tokens: Detokenizer(vocab, stop=("x",), min_tokens=min_tokens).append(ids)
        for min_tokens in (0, 1, 3, 6)
    }
    assert texts == {
        0: ("", "x", 1),
        1: ("", "x", 1),
        3: ("xx", "x", 3),
        6: ("xxxxx", None, 5),
    }


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_a_bad_id_is_this_sequence_s_error(
    byte_level: tokenizers.Tokenizer, stop: tuple[str, ...]
) -> None:
    vocab = vocab_of(byte_level)
    with pytest.raises(InternalError, match="-1"):
        Detokenizer(vocab, stop=stop).append([-1])
    past_the_end = [vocab.size, 2**31]  # rows of the model that the tokenizer does not have
    assert Detokenizer(vocab, stop=stop).append(past_the_end).text == ""


def test_simulated_text_is_readable() -> None:
    assert deltas(Detokenizer(simulated_vocab(1000)), [257, 300, 0]) == [" beba", " bepo", ""]


@pytest.mark.slow
def test_a_plain_token_costs_little() -> None:
    """A guard against a slow path for all, not a benchmark: some 0.6 µs, 5 allowed."""
    detokenizer = Detokenizer(simulated_vocab(30_000))
    ids = [[300 + i] for i in range(20_000)]
    best = min(_seconds(detokenizer, ids) for _ in range(5))
    assert best / len(ids) < 5e-6


def _seconds(detokenizer: Detokenizer, ids: list[list[int]]) -> float:
    start = time.perf_counter()
    for token_ids in ids:
        detokenizer.append(token_ids)
    return time.perf_counter() - start
