"""The compiler's tokenizer: what it does for speed shows in no mask."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from trioengine.engine_proc.structured_output import guidance
from trioengine.engine_proc.structured_output.guidance import GuidanceCompiler
from trioengine.structured import StructuredOutput

WORDS = ["the", "Cat", " sat", " On", "a" * 15, "b" * 16, "c" * 17, "  x", "d_", "e1", '"f', "g,"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_json() -> str:
    """Return a vocabulary of all bytes and some words, on both sides of every slice's edge."""
    pieces = dict.fromkeys(["<eos>", *LETTERS, *(word.replace(" ", "Ġ") for word in WORDS)])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocabulary = Vocabulary(models.BPE(vocab, []))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens(["<eos>"])
    return vocabulary.to_str()


SPECS = [
    StructuredOutput("regex", "[a-z ]{40}"),
    StructuredOutput("regex", "[A-Z][a-z]{2,30}\\."),
    StructuredOutput("regex", "([a-z]+ ){3,9}"),
    StructuredOutput("regex", "[a-zA-Z0-9_ ,]{5,60}"),
    StructuredOutput("regex", "(?s:.){9,60}"),
    StructuredOutput("json", '{"type": "string", "pattern": "^[a-z ]{5,40}$"}'),
    StructuredOutput("json_object", ""),
]


@pytest.mark.parametrize("structured", SPECS, ids=lambda each: each.spec or each.kind)
def test_slices_change_no_mask(
    structured: StructuredOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tokenizer_json()
    size = len(json.loads(text)["model"]["vocab"])
    sliced = GuidanceCompiler(lambda: text, vocab_size=size, eos_token_ids=(0,))
    sliced.warm_up()
    monkeypatch.setattr(guidance, "_SLICES", ())
    monkeypatch.setattr(LLTokenizer, "general_slices", staticmethod(list))
    plain = GuidanceCompiler(lambda: text, vocab_size=size, eos_token_ids=(0,))
    ours, reference = sliced(structured), plain(structured)
    rng = random.Random(3)
    for _ in range(10):
        one, other = ours.begin().matcher, reference.begin().matcher
        for _ in range(60):
            mask = other.compute_bitmask()
            assert one.compute_bitmask() == mask
            allowed = [t for t in range(size) if mask[t // 8] >> t % 8 & 1]
            token = rng.choice(allowed)
            assert one.consume_token(token)
            assert other.consume_token(token)
            if other.is_stopped():
                break
