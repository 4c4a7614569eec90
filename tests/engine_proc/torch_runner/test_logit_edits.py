"""Torch's masks, biases, penalties and logprobs against plain loops over float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import Sampling, sampling_rows
from helpers.sampling_reference import Extras, check_row, edited, extras_of_a_row, give_extras
from trioengine.engine_proc.runner import NO_TOKEN, SamplingRows, StepResult
from trioengine.outputs import LEAST_LOGPROB

pytestmark = pytest.mark.model

VOCAB = 203


def some_logits(num_rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(0.0, 3.0, (num_rows, VOCAB)).astype(np.float32)


def rows_of(asked: list[Extras], temperature: float = 0.0) -> SamplingRows:
    rows = sampling_rows([Sampling(temperature=temperature)] * len(asked))
    give_extras(rows, asked, VOCAB)
    return rows


def finish(logits: Any, rows: SamplingRows) -> StepResult:
    torch: Any = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.model_runner import _finish

    with torch.inference_mode():
        assert rows.targets is not None
        num_sampled = int((rows.targets < 0).sum())
        return _finish(iter([torch.from_numpy(logits.copy())]), rows, num_sampled)


@given(st.lists(extras_of_a_row(VOCAB), min_size=1, max_size=6), st.integers(0, 99))
def test_rows_equal_the_reference(asked: list[Extras], seed: int) -> None:
    logits = some_logits(len(asked), seed)
    result = finish(logits, rows_of(asked))
    assert result.logprobs is not None
    for row, extras in enumerate(asked):
        check_row(int(result.tokens[row]), result.logprobs, row, logits[row], extras)


@given(st.lists(extras_of_a_row(VOCAB), min_size=1, max_size=6), st.integers(0, 99))
def test_every_logit_is_edited_as_the_reference_says(asked: list[Extras], seed: int) -> None:
    torch: Any = pytest.importorskip("torch")
    from trioengine.engine_proc.torch_runner.logit_edits import edit_logits

    logits = some_logits(len(asked), seed)
    changed = torch.from_numpy(logits.copy())
    edit_logits(changed, rows_of(asked))
    for row, extras in enumerate(asked):
        expected = edited(logits[row], extras)
        # What float32 rounds off is in proportion to the terms, however small their sum.
        np.testing.assert_allclose(changed[row].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_targets_come_behind_what_is_sampled() -> None:
    logits = some_logits(600, 1)  # more rows than are held in float32 at once
    asked = [Extras(logprobs=1), *(Extras(target=i % VOCAB, logprobs=2) for i in range(1, 600))]
    result = finish(logits, rows_of(asked))
    assert result.tokens.tolist() == [int(logits[0].argmax()), *(i % VOCAB for i in range(1, 600))]
    assert result.logprobs is not None
    for row, extras in enumerate(asked):
        token = int(result.tokens[row])
        assert result.logprobs.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
        if row:
            assert token == extras.target


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_told_as_the_least(broken: float, temperature: float) -> None:
    logits = some_logits(3, 2)
    healthy = finish(logits, rows_of([Extras(logprobs=20)] * 3, temperature))
    logits[0] = broken
    logits[1, 7] = broken
    result = finish(logits, rows_of([Extras(logprobs=20)] * 3, temperature))
    assert healthy.logprobs is not None
    assert result.logprobs is not None
    for values in (result.logprobs.chosen, result.logprobs.top):
        assert np.isfinite(values).all()
        assert (values >= LEAST_LOGPROB).all()
        assert (values <= 0).all()
    assert (result.tokens[0] == NO_TOKEN) == (not broken > 0)
    assert result.tokens[2] == healthy.tokens[2]
    assert result.logprobs.chosen[2] == healthy.logprobs.chosen[2]
