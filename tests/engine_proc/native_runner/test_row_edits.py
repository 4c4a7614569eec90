"""Masks, biases and penalties of a greedy row, against the same in a few lines of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.numpy_llama import make_batch
from trioengine.engine_proc.runner import NO_TOKEN, AllowMasks, LogitBias, Penalties

if TYPE_CHECKING:
    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import StepBatch

    Float32Array = npt.NDArray[np.float32]

VOCAB = 203
ROWS = 120
ENTRIES = 12


def tokens_and_starts(
    rng: np.random.Generator, logits: Float32Array
) -> tuple[list[int], list[int]]:
    """Draw for each row up to twelve tokens, often its likeliest: there an edit shows."""
    ids, starts = [], [0]
    for row in logits:
        some = rng.permutation(VOCAB)[: rng.integers(0, ENTRIES)].tolist()
        likeliest = np.argsort(-row)[: rng.integers(0, 4)].tolist()
        ids += list(dict.fromkeys(likeliest + some))
        starts.append(len(ids))
    return ids, starts


def penalties(rng: np.random.Generator, logits: Float32Array) -> Penalties:
    ids, starts = tokens_and_starts(rng, logits)
    return Penalties(
        presence=rng.uniform(-2, 2, ROWS).astype(np.float32),
        frequency=rng.uniform(-2, 2, ROWS).astype(np.float32),
        repetition=rng.uniform(0.5, 2, ROWS).astype(np.float32),
        starts=np.array(starts, np.int32),
        token_ids=np.array(ids, np.int32),
        counts=rng.integers(0, 3, len(ids)).astype(np.int32),
    )


def bias(rng: np.random.Generator, logits: Float32Array) -> LogitBias:
    ids, starts = tokens_and_starts(rng, logits)
    values = rng.uniform(-3, 3, len(ids)).astype(np.float32)
    return LogitBias(np.array(starts, np.int32), np.array(ids, np.int32), values)


def allow(rng: np.random.Generator) -> AllowMasks:
    """Masks of single bits, of whole words, of everything, and of nothing."""
    words = rng.integers(0, 2**32, (4, 7), np.uint32)
    words[1] = np.where(rng.random(7) < 0.5, np.uint32(0), np.uint32(2**32 - 1))
    words[2], words[3] = np.uint32(2**32 - 1), 0
    return AllowMasks(words, rng.integers(-1, 4, ROWS).astype(np.int32))


def edited(batch: StepBatch, logits: Float32Array) -> Float32Array:
    """Apply what a batch says in the order that ``SamplingRows`` gives."""
    rows, out = batch.sampling, logits.copy()
    for r, line in enumerate(out):
        if rows.allow is not None and (mask := rows.allow.row_masks[r]) >= 0:
            bits = rows.allow.words[mask][:, None] >> np.arange(32, dtype=np.uint32) & 1
            line[bits.reshape(-1)[:VOCAB] == 0] = -np.inf
        for row, ids in rows.masked_token_ids:
            if row == r:
                line[ids] = -np.inf
        if rows.bias is not None:
            own = slice(rows.bias.starts[r], rows.bias.starts[r + 1])
            line[rows.bias.token_ids[own]] += rows.bias.values[own]
        if rows.penalties is not None:
            penalise(line, rows.penalties, r)
    return out


def penalise(line: Float32Array, p: Penalties, r: int) -> None:
    for entry in range(p.starts[r], p.starts[r + 1]):
        token, count = p.token_ids[entry], p.counts[entry]
        positive = line[token] > 0
        line[token] = line[token] / p.repetition[r] if positive else line[token] * p.repetition[r]
        line[token] -= p.frequency[r] * np.float32(count)
        line[token] -= p.presence[r] * np.float32(count > 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", ["allow", "bias", "penalties", "masks", "all"])
def test_the_likeliest_token_of_edited_logits_is_taken(
    open_tiny: OpenTiny, kinds: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    runner, _ = open_tiny(isa="portable", threads=1)
    tokens = rng.integers(0, VOCAB, ROWS).tolist()
    batch = make_batch([(tokens, 0, list(range(8)))], all_rows=True)
    _, logits = runner.logits(batch)
    if kinds in {"allow", "all"}:
        batch.sampling.allow = allow(rng)
    if kinds in {"bias", "all"}:
        batch.sampling.bias = bias(rng, logits)
    if kinds in {"penalties", "all"}:
        batch.sampling.penalties = penalties(rng, logits)
    if kinds in {"masks", "all"}:
        ids, starts = tokens_and_starts(rng, logits)
        batch.sampling.masked_token_ids = [
            (row, ids[starts[row] : starts[row + 1]]) for row in range(0, ROWS, 2)
        ]
    expected = edited(batch, logits)
    result = runner.execute(batch)
    nothing = (expected == -np.inf).all(axis=1)
    wanted = np.where(nothing, NO_TOKEN, expected.argmax(axis=1))
    np.testing.assert_array_equal(result.tokens, wanted)
