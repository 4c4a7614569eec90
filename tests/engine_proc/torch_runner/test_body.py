"""A prompt's logits, some rows at a time: the same numbers, and never all at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.reference import GREEDY, sampling_rows
from helpers.tiny_models import VOCAB
from trioengine.engine_proc.runner import StepBatch

if TYPE_CHECKING:
    from helpers.torch_fixtures import OpenRunner

pytestmark = pytest.mark.model

LENGTH = 400


def scoring_step() -> StepBatch:
    """One prompt, the token after it sampled in the first row, its own tokens scored after that."""
    tokens = random.Random(1).choices(range(1, VOCAB), k=LENGTH)
    sampling = sampling_rows([GREEDY] * LENGTH)
    sampling.logprobs_k = np.full(LENGTH, 2, np.int32)
    sampling.targets = np.array([-1, *tokens[1:]], np.int32)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(LENGTH, dtype=np.int32),
        query_start=np.array([0, LENGTH], np.int32),
        seq_lens=np.array([LENGTH], np.int32),
        block_tables=np.arange(100, dtype=np.int32)[None],
        logits_rows=np.array([LENGTH - 1, *range(LENGTH - 1)], np.int32),
        sampling=sampling,
    )


@pytest.mark.parametrize("name", ["llama-gqa2-hd64-tied", "gemma2", "gpt2", "granite-scales"])
def test_logits_in_chunks_are_those_of_all_at_once(
    open_runner: OpenRunner, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trioengine.engine_proc.torch_runner import model_runner

    runner = open_runner(name)
    network: Any = runner._network
    seen: list[int] = []
    passes: list[int] = []
    network.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape[-2])
    )
    network.get_input_embeddings().register_forward_hook(
        lambda module, args, output: passes.append(1)
    )
    chunked = runner.execute(scoring_step())
    assert seen == [256, 144]
    assert len(passes) == 1  # the layers below the head run once
    monkeypatch.setattr(model_runner, "ROWS_AT_ONCE", LENGTH)
    whole = runner.execute(scoring_step())
    assert seen[2:] == [LENGTH]
    assert chunked.tokens.tolist() == whole.tokens.tolist()
    assert chunked.logprobs is not None
    assert whole.logprobs is not None
    assert chunked.logprobs.top_ids.tolist() == whole.logprobs.top_ids.tolist()
    np.testing.assert_allclose(chunked.logprobs.chosen, whole.logprobs.chosen, atol=1e-4)
    np.testing.assert_allclose(chunked.logprobs.top, whole.logprobs.top, atol=1e-4)


def test_what_was_kept_for_one_step_is_not_taken_for_the_next(open_runner: OpenRunner) -> None:
    runner = open_runner("llama-gqa2-hd64-tied")
    first = runner.execute(scoring_step())
    other = scoring_step()
    other.token_ids[:] = other.token_ids[::-1].copy()
    changed = runner.execute(other)
    again = runner.execute(scoring_step())
    assert first.logprobs is not None
    assert changed.logprobs is not None
    assert again.logprobs is not None
    assert first.logprobs.chosen.tolist() == again.logprobs.chosen.tolist()
    assert first.logprobs.chosen.tolist() != changed.logprobs.chosen.tolist()
