"""What every model runner promises, whatever computes: the same cases over each of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.reference import GREEDY, MiniScheduler, Sampling, Seq, sampling_rows
from helpers.tiny_models import VOCAB
from trioengine.engine_proc.runner import StepBatch

if TYPE_CHECKING:
    from trioengine.engine_proc.runner import ModelRunner

DRAWN = Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=7)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(1, VOCAB), k=length)


def alone(runner: ModelRunner, sampling: Sampling, length: int = 37) -> Seq:
    """Run request 1 by itself, its prompt in one piece, for eight tokens."""
    scheduler = MiniScheduler(runner, seed=100)
    sequence = scheduler.add(prompt(length), sampling, request_id=1)
    scheduler.run([sequence], 8)
    return sequence


def test_a_runner_describes_itself(runner: ModelRunner) -> None:
    model = runner.model
    assert model.name
    assert model.runner
    assert model.max_model_len > 0
    assert all(0 <= token < model.vocab_size for token in model.eos_token_ids)
    assert runner.block_size > 0
    assert runner.num_blocks > 0


@SAMPLINGS
def test_company_changes_nothing(runner: ModelRunner, sampling: Sampling) -> None:
    expected = alone(runner, sampling)
    scheduler = MiniScheduler(runner, seed=1)
    others = [scheduler.add(prompt(n), Sampling(temperature=1.0, seed=n)) for n in (1, 50, 16)]
    sequence = scheduler.add(prompt(37), sampling, request_id=1)
    scheduler.run([*others[:2], sequence, *others[2:]], 8, chunk=11)
    assert sequence.output == expected.output


@SAMPLINGS
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunking_changes_nothing(runner: ModelRunner, sampling: Sampling, chunk: int) -> None:
    scheduler = MiniScheduler(runner, seed=2)
    sequence = scheduler.add(prompt(37), sampling, request_id=1)
    scheduler.run([sequence], 8, chunk=chunk)
    assert sequence.output == alone(runner, sampling).output


@SAMPLINGS
def test_preemption_changes_nothing(runner: ModelRunner, sampling: Sampling) -> None:
    scheduler = MiniScheduler(runner, seed=3)
    sequence = scheduler.add(prompt(37), sampling, request_id=1)
    for step in range(12):
        if step in {1, 5}:  # in the middle of the prompt, and of the answer
            scheduler.preempt(sequence)
        scheduler.step([sequence], [30])
    assert sequence.output[:8] == alone(runner, sampling).output


@SAMPLINGS
def test_a_shared_prefix_changes_nothing(runner: ModelRunner, sampling: Sampling) -> None:
    scheduler = MiniScheduler(runner, seed=4)
    owner = scheduler.add(prompt(37), GREEDY)
    scheduler.run([owner], 1)
    blocks = 37 // runner.block_size
    sequence = scheduler.add(prompt(37), sampling, share=owner, shared_blocks=blocks, request_id=1)
    scheduler.run([sequence, owner], 8)
    assert sequence.output == alone(runner, sampling).output


def test_other_seeds_give_other_answers(runner: ModelRunner) -> None:
    answers = {
        tuple(alone(runner, Sampling(temperature=1.0, seed=seed)).output) for seed in range(4)
    }
    assert len(answers) == 4


def test_masked_tokens_never_come(runner: ModelRunner) -> None:
    scheduler = MiniScheduler(runner, seed=5)
    masked = tuple(range(0, VOCAB, 2))
    sequences = [
        scheduler.add(prompt(5), Sampling(masked=masked)),
        scheduler.add(prompt(37), GREEDY, request_id=1),
        scheduler.add(prompt(9), Sampling(temperature=1.5, seed=1, masked=masked)),
    ]
    scheduler.run(sequences, 8)
    assert not set(masked) & {*sequences[0].output, *sequences[2].output}
    assert sequences[1].output == alone(runner, GREEDY).output


def one_sequence(tokens: list[int], rows: list[int], samplings: list[Sampling]) -> StepBatch:
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        query_start=np.array([0, len(tokens)], np.int32),
        seq_lens=np.array([len(tokens)], np.int32),
        block_tables=np.array([[5, 2, 9]], np.int32),
        logits_rows=np.array(rows, np.int32),
        sampling=sampling_rows(
            samplings, positions=[row + 1 for row in rows], request_ids=[1] * len(rows)
        ),
    )


def test_tokens_come_one_per_row_in_the_order_of_the_rows(runner: ModelRunner) -> None:
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(4)]
    rows = [0, 3, 8, 19]
    tokens = runner.execute(one_sequence(prompt(20), rows, samplings)).tokens
    assert tokens.dtype == np.int32
    assert tokens.shape == (4,)
    assert ((tokens >= 0) & (tokens < runner.model.vocab_size)).all()
    backwards = runner.execute(one_sequence(prompt(20), rows[::-1], samplings[::-1])).tokens
    assert backwards.tolist() == tokens.tolist()[::-1]


def test_a_step_without_rows_gives_no_tokens(runner: ModelRunner) -> None:
    tokens = runner.execute(one_sequence(prompt(20), [], [])).tokens
    assert tokens.dtype == np.int32
    assert tokens.shape == (0,)


def test_a_step_does_not_keep_or_change_the_arrays_it_was_given(runner: ModelRunner) -> None:
    """The engine's arrays are views of rows that live on: read in this step, then left alone."""
    batch = one_sequence(prompt(20), [19], [DRAWN])
    arrays = [
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        batch.logits_rows,
        *(getattr(batch.sampling, name) for name in ("temperature", "top_p", "seeds", "positions")),
    ]
    copies = [array.copy() for array in arrays]
    first = runner.execute(batch).tokens.copy()
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))
    batch.token_ids[:] = 0  # must not reach what was computed already
    again = runner.execute(one_sequence(prompt(20), [19], [DRAWN])).tokens
    assert again.tolist() == first.tolist()


def test_an_unknown_method_is_a_key_error(runner: ModelRunner) -> None:
    with pytest.raises(KeyError):
        runner.call("no_such_method", {})


def test_closing_twice_is_fine(runner: ModelRunner) -> None:
    runner.close()
    runner.close()
