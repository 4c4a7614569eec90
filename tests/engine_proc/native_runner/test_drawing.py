"""Draws from wide nuclei and from masked rows, on every instruction set, against plain numpy."""

from __future__ import annotations

import concurrent.futures
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.drawing import possible_draws
from helpers.native_fixtures import ISAS
from helpers.numpy_llama import TinyShape, make_batch
from trioengine.engine_proc.runner import NO_TOKEN, AllowMasks, LogitBias
from trioengine.engine_proc.uniform import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import StepBatch

    FloatArray = npt.NDArray[np.float32]

VOCAB = 331  # neither a multiple of 32 nor of 64
ROWS = 96


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, extension: Any) -> str:
    if request.param not in extension.usable_isas():
        pytest.skip(f"no {request.param} on this machine")
    name: str = request.param
    return name


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
def test_the_nucleus_may_be_of_any_width(
    extension: Any, isa: str, top_p: float, spread: float
) -> None:
    rng = np.random.default_rng(int(spread * 10))
    logits = (spread * rng.standard_normal(7000)).astype(np.float32)
    logits[::5] = logits[1]  # equals, which rank by id
    logits[::7] = -np.inf
    drawn = np.array([0.0, 0.2, 0.5, 0.77, 0.95, 0.99999])
    count = len(drawn)
    tokens = extension.sample(
        np.tile(logits, (count, 1)),
        [0.8] * count,
        [top_p] * count,
        [0] * count,
        [0.0] * count,
        drawn.tolist(),
        [],
        isa,
    )
    for token, uniform in zip(tokens, drawn.tolist(), strict=True):
        assert token in possible_draws(logits, 0.8, top_p, uniform)


def masked_batch(rng: np.random.Generator, *, top_p: float, top_k: int) -> StepBatch:
    tokens = rng.integers(0, VOCAB, ROWS).tolist()
    batch = make_batch([(tokens, 0, list(range(6)))], all_rows=True)
    words = rng.integers(0, 2**32, (5, -(-VOCAB // 32)), np.uint32)
    words[1], words[2] = np.uint32(2**32 - 1), 0
    words[3] = np.where(rng.random(words.shape[1]) < 0.5, np.uint32(0), np.uint32(2**32 - 1))
    words[4, :-1], words[4, -1] = 0, 1  # one token alone
    rows = batch.sampling
    rows.allow = AllowMasks(words, rng.integers(-1, 5, ROWS).astype(np.int32))
    rows.temperature = np.full(ROWS, 0.7, np.float32)
    rows.top_p[:], rows.top_k[:] = top_p, top_k
    rows.seeds[:] = np.arange(ROWS)
    rows.all_greedy = False
    return batch


def allowed_logits(allow: AllowMasks, row: int, logits: FloatArray) -> FloatArray:
    mask, out = allow.row_masks[row], logits.copy()
    if mask >= 0:
        bits = allow.words[mask][:, None] >> np.arange(32, dtype=np.uint32) & 1
        out[bits.reshape(-1)[:VOCAB] == 0] = -np.inf
    return out


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, VOCAB - 1)])
def test_a_masked_row_is_drawn_from_what_is_allowed(
    open_tiny: OpenTiny, isa: str, top_p: float, top_k: int
) -> None:
    runner, _ = open_tiny(TinyShape(vocab=VOCAB), isa=isa)
    batch = masked_batch(np.random.default_rng(top_k), top_p=top_p, top_k=top_k)
    told, logits = runner.logits(batch)
    tokens = runner.execute(batch).tokens
    np.testing.assert_array_equal(tokens, told.tokens)  # wherever the logits are kept
    rows = batch.sampling
    assert rows.allow is not None
    drawn = uniforms(rows.seeds, rows.positions)
    for row, token in enumerate(tokens.tolist()):
        own = allowed_logits(rows.allow, row, logits[row])
        if (own == -np.inf).all():
            assert token == NO_TOKEN
        elif top_k:
            assert own[token] > -np.inf
        else:
            assert token in possible_draws(own, 0.7, top_p, float(drawn[row]))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_waits_for_masks_that_others_still_fill(open_tiny: OpenTiny, threads: int) -> None:
    runner, _ = open_tiny(TinyShape(vocab=VOCAB), threads=threads)
    batch = masked_batch(np.random.default_rng(4), top_p=1.0, top_k=0)
    expected = runner.execute(batch).tokens
    assert batch.sampling.allow is not None
    words = batch.sampling.allow.words
    late = np.zeros((len(words), 16), np.uint32)[:, : words.shape[1]]  # rows lie apart, too

    def fill(part: int) -> None:
        hashlib.sha256(bytes(3_000_000 * (part + 1)))  # a step of this model takes 1 ms
        late[part::2] = words[part::2]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            late[:] = 0
            filling = [pool.submit(fill, part) for part in range(2)]
            batch.sampling.allow = AllowMasks(late, batch.sampling.allow.row_masks, filling)
            np.testing.assert_array_equal(runner.execute(batch).tokens, expected)


def test_what_a_row_is_told_does_not_change_what_it_draws(open_tiny: OpenTiny, isa: str) -> None:
    runner, _ = open_tiny(TinyShape(vocab=VOCAB), isa=isa)
    for top_p, top_k in ((1.0, 0), (0.8, 0), (0.9, 20)):
        batch = masked_batch(np.random.default_rng(3), top_p=top_p, top_k=top_k)
        tokens = runner.execute(batch).tokens
        batch.sampling.logprobs_k = np.resize(np.array([-1, 0, 5], np.int32), ROWS)
        np.testing.assert_array_equal(runner.execute(batch).tokens, tokens)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_what_biases_and_bans_change_is_drawn_as_it_is_then(
    open_tiny: OpenTiny, isa: str, top_p: float
) -> None:
    """The sums that the head has told are no longer true of the units that were changed."""
    runner, _ = open_tiny(TinyShape(vocab=VOCAB), isa=isa)
    batch = masked_batch(np.random.default_rng(1), top_p=top_p, top_k=0)
    rows = batch.sampling
    _, logits = runner.logits(batch)
    changed = [70, 5, 300]
    rows.bias = LogitBias(
        starts=np.arange(0, 3 * ROWS + 1, 3, dtype=np.int32),
        token_ids=np.array(changed * ROWS, np.int32),
        values=np.array([2.5, -4.0, 1.5] * ROWS, np.float32),
    )
    rows.masked_token_ids = [(row, [130, 131, 300]) for row in range(0, ROWS, 2)]
    tokens = runner.execute(batch).tokens
    np.testing.assert_array_equal(runner.logits(batch)[0].tokens, tokens)
    assert rows.allow is not None
    drawn = uniforms(rows.seeds, rows.positions)
    for row, token in enumerate(tokens.tolist()):
        own = allowed_logits(rows.allow, row, logits[row])
        own[changed] += np.array([2.5, -4.0, 1.5], np.float32)
        if row % 2 == 0:
            own[[130, 131, 300]] = -np.inf
        if (own == -np.inf).all():
            assert token == NO_TOKEN
        else:
            assert token in possible_draws(own, 0.7, top_p, float(drawn[row]))
