"""The simulated engine heeds masks, biases and penalties, and stays itself without them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reference import Sampling, sampling_rows
from helpers.requests import Spelling
from helpers.sampling_reference import (
    Extras,
    edited,
    extras_of_a_row,
    give_extras,
    run_core,
)
from trioengine.engine_proc.runner import NO_TOKEN
from trioengine.engine_proc.sim_logits import edit_row, sim_logits
from trioengine.engine_proc.sim_logprobs import sim_logprobs
from trioengine.engine_proc.sim_runner import SimModelRunner, SimScript
from trioengine.outputs import FinishReason
from trioengine.sampling_params import SamplingParams

VOCAB = 203
SPEAKABLE = np.arange(3, VOCAB, 2, dtype=np.int32)


@given(st.lists(extras_of_a_row(VOCAB), min_size=1, max_size=4), st.integers(0, 99))
def test_rows_equal_the_reference(asked: list[Extras], first: int) -> None:
    rows = sampling_rows([Sampling()] * len(asked))
    give_extras(rows, asked, VOCAB)
    for row, extras in enumerate(asked):
        logits = sim_logits(int(SPEAKABLE[first]), first, SPEAKABLE, VOCAB)
        expected = edited(logits, extras)
        token = edit_row(logits, rows, row)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        if expected.max() == -np.inf:
            assert token == NO_TOKEN
        else:
            assert expected[token] == pytest.approx(expected.max(), abs=1e-4)


def test_logits_say_what_logprobs_say() -> None:
    logits = sim_logits(int(SPEAKABLE[5]), 5, SPEAKABLE, VOCAB)
    told = sim_logprobs(SPEAKABLE[5:6], np.array([5]), SPEAKABLE, 20)
    np.testing.assert_allclose(logits[told.top_ids[0][1:]], told.top[0][1:], rtol=1e-6)
    assert logits.argmax() == SPEAKABLE[5]


def test_masks_of_every_word_end_the_request_and_not_the_engine() -> None:
    runner = SimModelRunner(SimScript(), vocab_size=9, eos_token_ids=(0,))
    words = tuple((word,) for word in range(1, 9))
    silent = SamplingParams(bad_words_token_ids=words, min_tokens=1)
    told, _ = run_core(
        runner, {1: ([1], silent), 2: ([1], SamplingParams())}, lambda params: Spelling()
    )
    assert told[1].finish_reason is FinishReason.ERROR
    assert told[2].finish_reason is FinishReason.LENGTH
