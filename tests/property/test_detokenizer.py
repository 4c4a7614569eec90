"""The joined text is the tokenizers library's own, for any tokens in any chunks."""

from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers import tiny_tokenizers
from trioengine.engine_proc.detokenizer import Detokenizer, DetokenizerVocab
from trioengine.models import resolve

Case = tuple[tokenizers.Tokenizer, DetokenizerVocab]
KINDS = [*tiny_tokenizers.of_every_kind(), "default_model"]


def _load(kind: str) -> tokenizers.Tokenizer:
    if kind != "default_model":
        return tiny_tokenizers.of_every_kind()[kind]
    model_dir = resolve.prepared_dir(resolve.resolve_model(resolve.DEFAULT_MODEL))
    if model_dir is None:
        pytest.skip("the default model is not in the cache")
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    tokenizer = _load(request.param)
    return tokenizer, DetokenizerVocab.from_json(tokenizer.to_str().encode())


def ids_of(vocab: DetokenizerVocab) -> st.SearchStrategy[list[int]]:
    """Any tokens, with fragments of characters far more often than chance has them."""
    special = st.sampled_from(sorted(vocab.special_texts) or [0])
    anything = st.integers(0, vocab.size + 2) | special
    fragments = st.sampled_from(sorted(vocab.fragments)) if vocab.fragments else anything
    return st.lists(anything | fragments, max_size=20)


def in_chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [*chunks, ids]


def has_bad_run(tokenizer: tokenizers.Tokenizer, ids: list[int], *, skip: bool) -> bool:
    """True where a run of byte tokens mixes characters and bytes that are none (see module).

    A special token ends a run, unless it is skipped.
    """
    tokens = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    spelled = " ".join(token for token in tokens if token and not (skip and token in special))
    for run in re.findall(r"(?:<0x[0-9A-F]{2}> ?)+", spelled):
        data = bytes.fromhex(re.sub(r"<0x|>", "", run))
        text = data.decode(errors="replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return True
    return False


@given(st.data(), st.lists(st.integers(0, 4), max_size=10), st.booleans())
def test_joined_text_is_that_of_the_whole(
    case: Case, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer, vocab = case
    ids = data.draw(ids_of(vocab))
    assume(not (vocab.byte_fallback and has_bad_run(tokenizer, ids, skip=skip)))
    # Without a decoder a special token, too, has a space before it: no generative model is so.
    assume(skip or tokenizer.decoder is not None or not vocab.special_texts.keys() & set(ids))
    detokenizer = Detokenizer(vocab, skip_special_tokens=skip)
    text = "".join(detokenizer.append(chunk).text for chunk in in_chunks(ids, sizes))
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30), st.lists(st.integers(0, 4), max_size=10))
def test_any_text_survives_the_round_trip(case: Case, text: str, sizes: list[int]) -> None:
    tokenizer, vocab = case
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(vocab)
    joined = "".join(detokenizer.append(chunk).text for chunk in in_chunks(ids, sizes))
    assert joined + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.data(), st.lists(st.integers(0, 4), max_size=10), st.integers(0, 5))
def test_chunks_carry_no_meaning_with_stop_strings(
    case: Case, data: st.DataObject, sizes: list[int], min_tokens: int
) -> None:
    tokenizer, vocab = case
    ids = data.draw(ids_of(vocab))
    stop = data.draw(stops_within(tokenizer.decode(ids)))
    one_by_one = [[token_id] for token_id in ids]
    whole = run(vocab, one_by_one, stop, min_tokens)
    assert run(vocab, in_chunks(ids, sizes), stop, min_tokens) == whole
    text, stopped_by, _ = whole
    unstopped, _, _ = run(vocab, one_by_one, (), 0)
    if stopped_by is not None:
        assert unstopped.startswith(text + stopped_by)
        return
    assert text == unstopped  # what looked like the beginning of a stop string is text after all
    if not min_tokens:
        # (U+FFFD may also stand for what was incomplete at the end, which stops nothing any more.)
        assert not any(one in text for one in stop if "\ufffd" not in one)


def stops_within(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Stop strings that have a chance: parts of the text, besides one that has none."""
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    parts = places.map(lambda place: text[place[0] : place[0] + place[1]] or "stop")
    return st.lists(parts, min_size=1, max_size=3).map(tuple)


def run(
    vocab: DetokenizerVocab, chunks: list[list[int]], stop: tuple[str, ...], min_tokens: int
) -> tuple[str, str | None, int]:
    """Return the text, the stop string, and how many tokens were used."""
    detokenizer = Detokenizer(vocab, stop=stop, min_tokens=min_tokens)
    text, used = "", 0
    for chunk in chunks:
        delta = detokenizer.append(chunk)
        text += delta.text
        used += delta.num_tokens
        if delta.stop_string is not None:
            return text + detokenizer.flush(), delta.stop_string, used
    return text + detokenizer.flush(), None, used
