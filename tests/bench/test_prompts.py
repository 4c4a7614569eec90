"""Prompts: the same each time, exact to the token, and disjoint between repeats."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from helpers.tiny_tokenizers import byte_fallback, byte_level
from trioengine.bench.prompts import SizingTokenizer, make_prompts
from trioengine.bench.sentences import sentences
from trioengine.bench.workloads import WORKLOADS, Workload
from trioengine.errors import ConfigError
from trioengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

SIMULATED = Tokenizer.simulated(49_152)
TOKENIZERS = {
    "simulated": SIMULATED,
    "byte_level": Tokenizer(byte_level()),
    "byte_fallback": Tokenizer(byte_fallback()),
}


def few(name: str, num_requests: int = 5) -> Workload:
    return msgspec.structs.replace(WORKLOADS[name], num_requests=num_requests)


def test_sentences_are_pinned() -> None:
    """On any Python: what a seed means must not drift between versions of a benchmark."""
    assert next(sentences("pinned")) == PINNED


PINNED = "The second violinist moved two hundred bricks as soon as the snow melted."


def test_sentences_differ_by_seed_and_go_on() -> None:
    first, second = (list(itertools.islice(sentences(seed), 200)) for seed in ("a", "b"))
    assert first == list(itertools.islice(sentences("a"), 200))
    assert first != second
    assert len(set(first)) > 190


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_each_prompt_has_exactly_its_tokens(name: str, kind: str) -> None:
    workload, tokenizer = few(name), TOKENIZERS[kind]
    prompts = make_prompts(workload, 1, tokenizer)
    assert len(prompts) == 5
    counts = [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert counts == [workload.total_prompt_tokens] * 5


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_shared_prefix_is_shared_to_the_token(kind: str) -> None:
    workload, tokenizer = few("W4"), TOKENIZERS[kind]
    encoded = [tokenizer.encode(text) for text in make_prompts(workload, 1, tokenizer)]
    heads = {tuple(ids[: workload.shared_tokens]) for ids in encoded}
    rests = {tuple(ids[workload.shared_tokens :]) for ids in encoded}
    assert (len(heads), len(rests)) == (1, 5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_they_are_made_alike_each_time(name: str) -> None:
    assert make_prompts(few(name), 2, SIMULATED) == make_prompts(few(name), 2, SIMULATED)


def test_another_process_makes_the_same_ones() -> None:
    """Nothing hangs on the seed of this process's hashes."""
    script = (
        "from trioengine.bench.prompts import make_prompts\n"
        "from trioengine.bench.workloads import WORKLOADS\n"
        "from trioengine.text.tokenizer import Tokenizer\n"
        "print(make_prompts(WORKLOADS['W1'], 3, Tokenizer.simulated(49_152)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{make_prompts(WORKLOADS['W1'], 3, SIMULATED)}\n"


def test_no_two_prompts_of_any_repeat_begin_alike() -> None:
    """Else a prefix cache would carry one repeat's work into the next."""
    prompts = [
        prompt
        for rep in range(4)
        for name in ("W1", "W2", "W3", "FE")
        for prompt in make_prompts(WORKLOADS[name], rep, SIMULATED)
    ]
    prompts += [make_prompts(few("W4", 1), rep, SIMULATED)[0] for rep in range(4)]
    openings = {prompt[: len("Note FE.1.511:")] for prompt in prompts}
    assert len(openings) == len(prompts) == 4 * (5 + 64 + 128 + 512 + 1)


def test_more_requests_keep_the_first_ones() -> None:
    assert make_prompts(few("W2", 9), 1, SIMULATED)[:3] == make_prompts(few("W2", 3), 1, SIMULATED)


def test_sizes_too_small_for_the_label_are_refused() -> None:
    workload = Workload(name="W1", concurrency=1, num_requests=1, prompt_tokens=3, output_tokens=1)
    with pytest.raises(ConfigError, match="exactly 3 tokens"):
        make_prompts(workload, 1, SIMULATED)


class Lossy:
    """A token a character; decoding loses a last letter."""

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        text = "".join(map(chr, ids[1:]))
        return text[:-1] if text[-1].isalpha() else text


class Foresighted(Lossy):
    """The first token says whether the text ends with a vowel."""

    def encode(self, text: str) -> list[int]:
        return [2 if text[-1] in "aeiou" else 1, *map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids[1:]))


class Merging(Lossy):
    """A consonant and a space after it are one token."""

    def encode(self, text: str) -> list[int]:
        return [
            ord(pair[0]) + 1000 * len(pair) for pair in re.findall("[b-df-hj-np-tv-z] |.", text)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i % 1000) + " " * (i // 1000 - 1) for i in ids)


class Uncased(Lossy):
    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).lower()


@pytest.mark.parametrize("name", ["W1", "W4"])
@pytest.mark.parametrize("rep", range(4))
@pytest.mark.parametrize(
    "tokenizer", [Lossy(), Foresighted(), Merging()], ids=lambda each: type(each).__name__
)
def test_cuts_that_encode_otherwise_are_not_taken(
    name: str, rep: int, tokenizer: SizingTokenizer
) -> None:
    workload = few(name)
    encoded = [tokenizer.encode(text) for text in make_prompts(workload, rep, tokenizer)]
    assert {len(ids) for ids in encoded} == {workload.total_prompt_tokens}
    assert len({tuple(ids[: workload.shared_tokens]) for ids in encoded}) == 1


def test_prompts_that_lose_their_label_are_not_taken() -> None:
    with pytest.raises(ConfigError, match="exactly 64 tokens"):
        make_prompts(few("W1"), 1, Uncased())
