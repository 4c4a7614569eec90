from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from helpers import tiny_tokenizers
from trioengine.errors import ConfigError
from trioengine.text.vocabulary import SIMULATED_EOS_ID, Vocabulary, simulated_tokens

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_every_token_has_bytes(kind: str) -> None:
    tokenizer = tiny_tokenizers.of_every_kind()[kind]
    vocabulary = Vocabulary.from_json(tokenizer.to_str().encode())
    assert vocabulary.size == tokenizer.get_vocab_size()
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    assert set(vocabulary.special_texts.values()) == special
    for token_id in range(vocabulary.size):
        token = tokenizer.id_to_token(token_id)
        raw = vocabulary.token_bytes(token_id)
        if token in special:
            assert raw.decode() == token
        elif token_id not in vocabulary.fragments:
            # Behind another token, so that nothing is lost at the start.
            (x,) = tiny_tokenizers.ids_of(tokenizer, "x")
            assert tokenizer.decode([x, token_id]) == f"x{raw.decode()}"


def test_fragments_are_what_is_no_text_alone() -> None:
    vocabulary = Vocabulary.from_json(tiny_tokenizers.byte_fallback().to_str().encode())
    assert set(vocabulary.fragments.values()) == {bytes([byte]) for byte in range(0x80, 0x100)}
    assert vocabulary.byte_fallback


def test_no_such_token() -> None:
    with pytest.raises(KeyError):
        Vocabulary.simulated(300).token_bytes(300)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: No such file"):
        Vocabulary.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used: .*vocab"):
        Vocabulary.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}, "decoder": {"type": "CTC"}}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used: .*CTC"):
        Vocabulary.from_dir(tmp_path)


def test_simulated_tokens_are_all_different() -> None:
    tokens = simulated_tokens(100_000)
    assert len(set(tokens)) == 100_000
    assert all(token.isascii() for token in (t.removeprefix("Ġ") for t in tokens[257:]))
    assert Vocabulary.simulated(300).special_texts == {SIMULATED_EOS_ID: tokens[0]}


@pytest.mark.slow
def test_building_is_quick() -> None:
    """Some 0.06 s for 49,152 tokens; 0.4 s allowed, so that only a slow path fails this."""
    start = time.perf_counter()
    Vocabulary.simulated(49_152)
    assert time.perf_counter() - start < 0.4
