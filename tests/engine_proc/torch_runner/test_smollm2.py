"""The default model itself, where it is in the user's cache: greedy tokens equal ``generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.logprob_check import check_logprobs
from helpers.reference import (
    MiniScheduler,
    load_reference,
    reference_generate,
    reference_logits,
    tap_logits,
)

if TYPE_CHECKING:
    from pathlib import Path

    from helpers.torch_fixtures import OpenRunner
    from trioengine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 10
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "The",
    "Once upon a time, in a village by the sea, there lived",
    " ".join(f"Line {i}: the number {i * i} is the square of {i}." for i in range(1, 13)),
]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    from trioengine.models.resolve import prepared_dir, resolve_model

    directory = prepared_dir(resolve_model("smollm2-135m-instruct"))
    if directory is None:
        pytest.skip(
            "not in the cache; `trioengine models fetch smollm2-135m-instruct` puts it there"
        )
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    from trioengine.text.tokenizer import Tokenizer

    return Tokenizer.from_dir(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return load_reference(model_dir)


def test_greedy_tokens_equal_generate_through_chunks_prefixes_and_preemption(
    open_runner: OpenRunner, model_dir: Path, tokenizer: Tokenizer, reference: Any
) -> None:
    runner = open_runner(model_dir, kv_cache_memory_gib=0.5)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    with tap_logits(runner) as tap:
        scheduler = MiniScheduler(runner, tap=tap)
        sequences = [scheduler.add(prompt) for prompt in prompts]
        scheduler.run(sequences, 3, chunk=61)
        shared = 16 * (len(prompts[-1]) // 16)
        sequences.append(
            scheduler.add(prompts[-1], share=sequences[-1], shared_blocks=shared // 16 - 1)
        )
        scheduler.preempt(sequences[2])
        scheduler.run(sequences, NUM_TOKENS, chunk=100)
    for seq in sequences:
        expected = reference_logits(reference, seq.tokens[:-1], NUM_TOKENS)
        np.testing.assert_allclose(np.array(seq.logits), expected, rtol=0, atol=2e-3)
    for seq, prompt in zip(sequences, [*prompts, prompts[-1]], strict=True):
        generated = reference_generate(reference, prompt, NUM_TOKENS)
        assert seq.output[: len(generated)] == generated
        assert len(generated) == NUM_TOKENS or generated[-1] in runner.model.eos_token_ids


def test_the_model_knows_the_capital_of_france(
    open_runner: OpenRunner, model_dir: Path, tokenizer: Tokenizer
) -> None:
    runner = open_runner(model_dir, dtype="auto", kv_cache_memory_gib=0.5)
    scheduler = MiniScheduler(runner)
    sequence = scheduler.add(tokenizer.encode(PROMPTS[0]))
    scheduler.run([sequence], 8)
    assert "Paris" in tokenizer.decode(sequence.output)
    assert sequence.output[-1] in runner.model.eos_token_ids


def test_logprobs_equal_transformers(
    open_runner: OpenRunner, model_dir: Path, tokenizer: Tokenizer, reference: Any
) -> None:
    runner = open_runner(model_dir, kv_cache_memory_gib=0.5)
    check_logprobs(runner, reference, tokenizer.encode(PROMPTS[3]))
