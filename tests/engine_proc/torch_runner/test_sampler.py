from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import GREEDY, Sampling, sampling_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

pytestmark = pytest.mark.model

LARGE_VOCAB = 5000  # more than the widest prefilter


def sample(
    logits: Logits, rows: Sequence[Sampling], positions: Sequence[int] | None = None
) -> list[int]:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.sampler import sample as sample_

    chosen = sampling_rows(rows, positions=positions)
    tokens: list[int] = sample_(torch.from_numpy(logits.copy()), chosen).tolist()
    return tokens


def some_logits(num_rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0.0, spread, (num_rows, vocab)).astype(np.float32)


def kept_probabilities(logits: Logits, row: Sampling) -> npt.NDArray[np.float64]:
    """Return what ``row`` may draw, the slow and obvious way: sort, cut, normalise."""
    scores = logits.astype(np.float64) / row.temperature
    scores[list(row.masked)] = -np.inf
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    probs[probs < row.min_p * probs.max()] = 0.0
    order = np.argsort(-probs, kind="stable")
    if row.top_k > 0:
        probs[order[row.top_k :]] = 0.0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= row.top_p]] = 0.0
    kept: npt.NDArray[np.float64] = probs / probs.sum()
    return kept


def draw_many(logits: Logits, row: Sampling, count: int) -> npt.NDArray[np.int64]:
    tokens = sample(np.repeat(logits[None], count, 0), [row] * count, list(range(count)))
    return np.bincount(tokens, minlength=len(logits))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[0, [40, 7, 99]] = 5.0
    assert sample(logits, [GREEDY, GREEDY]) == [7, 0]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = some_logits(3, 100)
    rows = [GREEDY, Sampling(temperature=1.0, seed=3), GREEDY]
    tokens = sample(logits, rows)
    assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(1).tolist()


def test_half_precision_logits_are_sampled_in_single_precision() -> None:
    torch = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.sampler import sample as sample_

    logits = torch.from_numpy(some_logits(200, 300, spread=0.5)).bfloat16()
    rows = [Sampling(temperature=0.7, top_p=0.9, seed=seed) for seed in range(200)]
    assert sample_(logits, sampling_rows(rows)).tolist() == sample(logits.float().numpy(), rows)


FILTERS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=20, top_p=0.8),
    Sampling(temperature=1.3, top_k=30, top_p=0.9, min_p=0.05),
    Sampling(temperature=1.0, top_p=0.7, min_p=0.1),
    Sampling(temperature=1.0, masked=(0, 1, 2, 3)),
    Sampling(temperature=1.0, top_k=3, masked=(0, 1, 2, 3)),
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_draws_follow_the_distribution_that_the_filters_leave(row: Sampling) -> None:
    logits = some_logits(1, 50, spread=1.5)[0]
    expected = kept_probabilities(logits, row) * 4000
    counts = draw_many(logits, row, 4000)
    assert not counts[expected == 0.0].any(), "a token was drawn that the filters forbid"
    deviation = np.abs(counts - expected)
    assert (deviation <= 5.0 * np.sqrt(expected) + 1.0).all()


WIDE = [
    Sampling(temperature=1.0, top_k=300),  # beyond the first prefilter
    Sampling(temperature=1.0, top_k=2000),  # beyond the second
    Sampling(temperature=1.0, top_p=0.05),
    Sampling(temperature=1.0, top_p=0.3),
    Sampling(temperature=1.0, top_p=0.999),
    Sampling(temperature=1.0, min_p=0.5),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.0, min_p=0.001),
    Sampling(temperature=1.0, min_p=0.001, top_p=0.5),
]


@pytest.mark.parametrize("row", WIDE, ids=str)
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_prefilters_never_change_what_is_kept(row: Sampling, spread: float) -> None:
    logits = some_logits(1, LARGE_VOCAB, spread)[0]
    expected = kept_probabilities(logits, row)
    counts = draw_many(logits, row, 400)
    least = logits[expected > 0.0].min()
    forbidden = logits < least - 1e-3  # rounding may move the very edge
    assert not counts[forbidden].any()
    # Half of the mass must get half of the draws, so nothing that is kept was cut off either.
    order = np.argsort(-expected)
    half = order[: int(np.searchsorted(expected[order].cumsum(), 0.5)) + 1]
    assert abs(counts[half].sum() / 400 - expected[half].sum()) < 0.13


ROWS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 40, 64, 65, 1500]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    masked=st.sampled_from([(), (0,), tuple(range(100))]),
)


@given(st.lists(ROWS, min_size=2, max_size=6), st.sampled_from([0.1, 2.0]), st.integers(0, 99))
def test_a_row_does_not_depend_on_its_batch_mates(
    rows: list[Sampling], spread: float, seed: int
) -> None:
    logits = some_logits(len(rows), LARGE_VOCAB, spread, seed)
    positions = list(range(seed, seed + len(rows)))
    together = sample(logits, rows, positions)
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row], positions[i : i + 1]) == [together[i]]
        assert together[i] not in row.masked
        if row.top_k == 1 or row.min_p == 1.0:
            allowed = np.delete(logits[i], list(row.masked))
            assert logits[i, together[i]] == allowed.max()


def test_a_row_depends_on_its_seed_and_on_its_position() -> None:
    logits = np.zeros((1, LARGE_VOCAB), np.float32)
    drawn = {
        sample(logits, [Sampling(temperature=1.0, seed=seed)], [position])[0]
        for seed in range(5)
        for position in range(5)
    }
    assert len(drawn) == 25


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = some_logits(1, 200, spread=30.0)
    row = Sampling(temperature=temperature, top_p=top_p, seed=9)
    assert sample(logits, [row]) == [int(logits.argmax())]


def test_a_huge_temperature_is_uniform() -> None:
    counts = draw_many(some_logits(1, 10)[0], Sampling(temperature=3e38), 2000)
    assert counts.min() > 130


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_row_stays_an_index_and_harms_nobody(top_p: float, poison: float) -> None:
    logits = some_logits(3, LARGE_VOCAB)
    rows = [Sampling(temperature=1.0, top_p=top_p, seed=seed) for seed in range(3)]
    healthy = sample(logits, rows)
    logits[1, 17] = poison
    tokens = sample(logits, rows)
    assert [tokens[0], tokens[2]] == [healthy[0], healthy[2]]
    assert 0 <= tokens[1] < LARGE_VOCAB


def test_a_uniform_next_to_one_never_draws_a_token_of_no_weight() -> None:
    torch: Any = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.sampler import _invert

    weights = torch.tensor([[0.0, 0.3, 0.7, 0.0, 0.0]])
    for uniform in (0.0, 1.0 - 2.0**-53):
        (column,) = _invert(weights, torch.tensor([[uniform]], dtype=torch.float64)).tolist()
        assert column == (1 if uniform == 0.0 else 2)
