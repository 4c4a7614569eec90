from __future__ import annotations

import math

import numpy as np
import pytest

from trioengine.engine_proc.sim_logprobs import sim_logprobs
from trioengine.outputs import LEAST_LOGPROB

RING = np.array([3, 5, 8, 9], np.int32)


def test_each_word_is_half_as_likely_as_the_one_before_it() -> None:
    tokens, first = np.array([8, 3, 5], np.int32), np.array([2, 2, 2], np.int64)
    found = sim_logprobs(tokens, first, RING, 3)
    assert found.chosen.tolist() == pytest.approx([math.log(p) for p in (1 / 2, 1 / 8, 1 / 16)])
    assert found.ranks.tolist() == [1, 3, 4]
    assert found.top_ids.tolist() == [[8, 9, 3]] * 3
    assert found.top[0].tolist() == pytest.approx([math.log(p) for p in (1 / 2, 1 / 4, 1 / 8)])
    assert found.chosen[1] == found.top[1, 2]  # the same number, not one like it


@pytest.mark.parametrize("token", [0, 4, 99])
def test_what_cannot_be_said_has_no_probability(token: int) -> None:
    found = sim_logprobs(np.array([token], np.int32), np.array([0], np.int64), RING, 0)
    assert found.chosen.tolist() == [LEAST_LOGPROB]
    assert found.ranks.tolist() == [5]
    assert found.top_ids.shape == (1, 0)


def test_nothing_is_below_the_least() -> None:
    ring = np.arange(60_000, dtype=np.int32)
    found = sim_logprobs(np.array([59_999], np.int32), np.array([0], np.int64), ring, 1)
    assert found.chosen.tolist() == [LEAST_LOGPROB]
