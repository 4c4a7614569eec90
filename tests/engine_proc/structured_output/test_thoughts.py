"""Answers after a thought, in vocabularies that spell its marks in every way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import AddedToken

from helpers import tiny_tokenizers
from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.errors import InvalidRequestError
from trioengine.structured import StructuredKind, StructuredOutput, Thought

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 512
SPECS: dict[StructuredKind, tuple[str, str, str]] = {
    "json": ('{"enum": ["a", 1]}', '"a"', "true"),
    "json_object": ("", '{"a": [1]}', "[]"),
    "regex": ("[ab]{3}", "aba", "c"),
    "choice": ('["yes", "no"]', "yes", "maybe"),
    "grammar": ('start: "q" /[0-9]/', "q7", "7"),
}


def vocabulary(*marks: str) -> Tokenizer:
    """Return one that has a token of its own for these marks."""
    tokenizer = tiny_tokenizers.byte_level()
    without = json.loads(tokenizer.to_str())
    without["added_tokens"] = [t for t in without["added_tokens"] if t["content"] != "<think>"]
    tokenizer = tokenizer.from_str(json.dumps(without))
    tokenizer.add_tokens([AddedToken(mark) for mark in marks])
    return tokenizer


SPELLED = vocabulary()
WHOLE = vocabulary("<think>", "</think>")


class Reader:
    """Reads texts by a grammar after a thought."""

    def __init__(self, tokenizer: Tokenizer, kind: StructuredKind, thought: Thought) -> None:
        self._tokenizer = tokenizer
        compiler = GuidanceCompiler(tokenizer.to_str, vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
        self._grammar = compiler(StructuredOutput(kind, SPECS[kind][0], thought=thought))

    def takes(self, *parts: str, pieces: int = 0) -> bool:
        """Say whether the parts, each tokenised by itself, are a whole answer.

        Args:
            parts: Of the text.
            pieces: In so many of them the marks of thoughts are spelled letter by letter.
        """
        tokens: list[int] = []
        for number, part in enumerate(parts):
            tokenizer = SPELLED if number < pieces else self._tokenizer
            tokens += tokenizer.encode(part).ids
        matcher = self._grammar.begin().matcher
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def ends_after(self, text: str) -> bool:
        """Say whether the text may be followed by the end of the sequence."""
        matcher = self._grammar.begin().matcher
        assert matcher.consume_tokens(self._tokenizer.encode(text).ids)
        return bool(matcher.compute_bitmask()[0] & 1)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("tokenizer", [SPELLED, WHOLE], ids=["spelled", "whole"])
def test_the_shape_begins_where_an_open_thought_ends(
    tokenizer: Tokenizer, kind: StructuredKind
) -> None:
    _, good, bad = SPECS[kind]
    reader = Reader(tokenizer, kind, "open")
    for thought in ("", "hm", "é <thi </thin {[ </ \n", good):
        for gap in ("", "\n\n", " \t"):
            assert reader.takes(f"{thought}</think>{gap}{good}"), (thought, gap)
            assert reader.takes(thought, "</think>", gap, good, pieces=9), (thought, gap)
            assert not reader.takes(f"{thought}</think>{gap}{bad}")
    assert not reader.takes(good)
    # The first end is the end: that is where the text will be split.
    assert not reader.takes("a", "</think>", "b", "</think>", good)
    assert not reader.takes("a", "</think>", "b", "</think>", good, pieces=9)
    if tokenizer is WHOLE:
        assert reader.takes("a </thin", "b", "</think>", good, pieces=1)
        assert not reader.takes("a</think>", "b", "</think>", good, pieces=1)
    assert not reader.ends_after("a thought")
    assert reader.ends_after(f"a thought</think>{good}")


@pytest.mark.parametrize("kind", SPECS)
def test_a_model_that_may_think_may_also_answer_at_once(kind: StructuredKind) -> None:
    _, good, bad = SPECS[kind]
    reader = Reader(WHOLE, kind, "optional")
    assert reader.takes(good)
    assert reader.takes(f"<think>\nhm\n</think>\n\n{good}")
    assert not reader.takes(bad)
    assert not reader.takes(f" {good}")
    assert not reader.takes(f"<think>hm</think>{bad}")
    assert not reader.takes(f"hm</think>{good}")
    assert not reader.takes(f"<think>hm</think><think>hm</think>{good}")


@pytest.mark.parametrize("kind", SPECS)
def test_a_model_without_a_token_for_it_does_not_begin_a_thought(kind: StructuredKind) -> None:
    reader = Reader(SPELLED, kind, "optional")
    assert reader.takes(SPECS[kind][1])
    assert not reader.takes(f"<think>hm</think>{SPECS[kind][1]}")


def test_a_bad_shape_is_refused_after_a_thought_too() -> None:
    compiler = GuidanceCompiler(WHOLE.to_str, vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
    for kind, spec in (("regex", "(a"), ("grammar", "start: ???"), ("json", '{"type": "x"}')):
        with pytest.raises(InvalidRequestError) as refusal:
            compiler(StructuredOutput(kind, spec, thought="open", param="p"))  # type: ignore[arg-type]
        assert refusal.value.param == "p"
