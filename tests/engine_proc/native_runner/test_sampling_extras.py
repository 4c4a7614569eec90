"""The C++ behind penalties, biases, masks and logprobs, against plain loops over its own logits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.native_fixtures import ISAS
from helpers.numpy_llama import NumpyLlama, TinyShape, make_batch
from helpers.sampling_reference import (
    Extras,
    check_row,
    extras_of_a_row,
    give_extras,
    log_softmax,
)
from trioengine.engine_proc.runner import NO_TOKEN, StepBatch
from trioengine.outputs import LEAST_LOGPROB

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

VOCAB = 203  # no multiple of 32 or 64
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 12).tolist()

rows_of_a_step = st.lists(extras_of_a_row(VOCAB), min_size=2, max_size=len(TOKENS))


def batch_of(asked: list[Extras]) -> StepBatch:
    batch = make_batch([(TOKENS, 0, [1])], all_rows=True)
    assert len(batch.logits_rows) == len(TOKENS)
    rest = [Extras()] * (len(TOKENS) - len(asked))
    give_extras(batch.sampling, [*asked, *rest], VOCAB)
    return batch


@pytest.fixture(params=ISAS)
def runner(
    request: pytest.FixtureRequest, extension: Any, open_tiny: OpenTiny
) -> NativeModelRunner:
    if request.param not in extension.usable_isas():
        pytest.skip(f"no {request.param} on this machine")
    return open_tiny(TinyShape(vocab=VOCAB), isa=request.param)[0]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=rows_of_a_step)
def test_rows_equal_the_reference(runner: NativeModelRunner, asked: list[Extras]) -> None:
    result, logits = runner.logits(batch_of(asked))
    _, own = runner.logits(make_batch([(TOKENS, 0, [1])], all_rows=True))
    np.testing.assert_array_equal(logits, own)  # told before any of it
    assert result.logprobs is not None
    for row, extras in enumerate(asked):
        check_row(int(result.tokens[row]), result.logprobs, row, logits[row], extras)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=rows_of_a_step, seed=st.integers(0, 9))
def test_no_row_changes_a_bit_of_another(
    runner: NativeModelRunner, asked: list[Extras], seed: int
) -> None:
    def outcome(these: list[Extras], row: int) -> Any:
        batch = batch_of(these)
        batch.sampling.temperature[::2] = 0.9
        batch.sampling.top_p[::3] = 0.9
        batch.sampling.seeds[:] = seed
        batch.sampling.all_greedy = False
        result = runner.execute(batch)
        found, k = result.logprobs, these[row].logprobs
        assert found is not None
        told = [found.chosen[row], found.ranks[row], *found.top[row, : max(k, 0)]]
        return int(result.tokens[row]), told if k >= 0 else None

    last = len(asked) - 1
    alone = [Extras()] * last + [asked[last]]
    assert outcome(asked, last) == outcome(alone, last)


def test_logprobs_are_near_those_of_exact_arithmetic(open_tiny: OpenTiny) -> None:
    """Weights and activations are rounded to bfloat16, sums are not: that is all the difference."""
    runner, model = open_tiny(TinyShape(vocab=VOCAB))
    result = runner.execute(batch_of([Extras(logprobs=5)] * len(TOKENS)))
    exact = [log_softmax(row) for row in model.logits(TOKENS)]
    assert result.logprobs is not None
    expected = [row[token] for row, token in zip(exact, result.tokens, strict=True)]
    np.testing.assert_allclose(result.logprobs.chosen, expected, atol=0.02)


def test_a_target_comes_whatever_is_likely(runner: NativeModelRunner) -> None:
    targets = [(7 * i + 3) % VOCAB for i in range(len(TOKENS))]
    batch = batch_of([Extras(target=target, logprobs=2) for target in targets])
    result, logits = runner.logits(batch)
    assert result.tokens.tolist() == targets
    assert result.logprobs is not None
    expected = [log_softmax(row)[target] for row, target in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(result.logprobs.chosen, expected, atol=1e-5)


def test_more_likeliest_tokens_than_there_are(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny(TinyShape(vocab=9))
    batch = make_batch([([1, 2, 3], 0, [1])], all_rows=True)
    give_extras(batch.sampling, [Extras(logprobs=9)] * 3, 9)
    found = runner.execute(batch).logprobs
    assert found is not None
    assert found.top_ids.shape == (3, 9)
    assert sorted(found.top_ids[0].tolist()) == list(range(9))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_told_as_the_least(open_tiny: OpenTiny, broken: float) -> None:
    """A token with a broken logit, and rows with nothing but such logits, beside healthy ones."""
    model = NumpyLlama(TinyShape(vocab=VOCAB))
    model.tensors["model.embed_tokens.weight"][7] = broken
    runner, _ = open_tiny(model)
    batch = make_batch([([7] * 8, 0, [3]), ([1, 2, 3], 0, [4])], all_rows=True)
    asked = [Extras(logprobs=20, allowed=(7, 8, 9), bias=((7, 1.0),))] * 11
    give_extras(batch.sampling, asked, VOCAB)
    for temperature in (0.0, 0.8):
        batch.sampling.temperature[:] = temperature
        result = runner.execute(batch)
        found = result.logprobs
        assert found is not None
        assert set(result.tokens.tolist()) <= {NO_TOKEN, 7, 8, 9}
        for values in (found.chosen, found.top):
            assert np.isfinite(values).all()
            assert (values >= LEAST_LOGPROB).all()
            assert (values <= 0).all()


def setter(part: str, name: str, values: Any, dtype: Any) -> Callable[[StepBatch], None]:
    def change(batch: StepBatch) -> None:
        owner = getattr(batch.sampling, part) if part else batch.sampling
        setattr(owner, name, np.array(values, dtype))

    return change


LAST = [0] * (len(TOKENS) - 1)
UNSOUND = {
    "entries that fall": (setter("bias", "starts", [0, 1, 0, *LAST[2:], 1], np.int32), "falls"),
    "entries that begin late": (setter("bias", "starts", [1] * 13, np.int32), "begin with 0"),
    "entries that end early": (setter("penalties", "starts", [0] * 13, np.int32), "must end"),
    "a bias of no token": (setter("bias", "token_ids", [VOCAB], np.int32), "bias.token_ids"),
    "a bias that is no number": (setter("bias", "values", [np.nan], np.float32), "bias.values"),
    "a penalty of no token": (setter("penalties", "token_ids", [-1], np.int32), "token_ids"),
    "a count below 0": (setter("penalties", "counts", [-1], np.int32), "counts"),
    "a repetition of 0": (setter("penalties", "repetition", [0, *LAST], np.float32), "repetition"),
    "a presence of infinity": (
        setter("penalties", "presence", [np.inf, *LAST], np.float32),
        "presence",
    ),
    "too few penalties": (setter("penalties", "frequency", [0.0], np.float32), "expected 12"),
    "a mask that is not there": (setter("allow", "row_masks", [1, *LAST], np.int32), "row_masks"),
    "a mask too narrow": (setter("allow", "words", [[1]], np.uint32), "vocabulary"),
    "words of another type": (setter("allow", "words", [[1] * 7], np.int32), "wrong dtype"),
    "a target of no token": (setter("", "targets", [VOCAB, *LAST], np.int32), "targets"),
    "too many likeliest": (
        setter("", "logprobs_k", [VOCAB + 1, *LAST], np.int32),
        "logprobs_k",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_arrays_are_refused(open_tiny: OpenTiny, case: str) -> None:
    change, message = UNSOUND[case]
    runner, _ = open_tiny(TinyShape(vocab=VOCAB))
    batch = batch_of([Extras(bias=((1, 1.0),), output=(2,), allowed=(3,), logprobs=1)])
    change(batch)
    with pytest.raises(ValueError, match=message):
        runner.execute(batch)


CHOICES = [
    (Extras(presence=2.0, prompt=(1,)), "likelier"),  # of the prompt only repetition takes notice
    (Extras(presence=2.0, output=(1,)), "other"),
    (Extras(presence=0.5, output=(1, 1, 1)), "likelier"),  # once, however often it came
    (Extras(frequency=0.5, output=(1,)), "likelier"),
    (Extras(frequency=0.5, output=(1, 1, 1)), "other"),
    (Extras(frequency=2.0, prompt=(1, 1, 1)), "likelier"),
    (Extras(repetition=2.0, prompt=(1,)), "other"),
    (Extras(repetition=2.0, output=(1, 1)), "other"),
    (Extras(repetition=0.5, output=(0,)), "other"),
    (Extras(), "likelier"),
]


@pytest.mark.parametrize(("extras", "comes"), CHOICES)
def test_penalties_decide_between_two(open_tiny: OpenTiny, extras: Extras, comes: str) -> None:
    """Two tokens with logits 4 and 3: token 1 of ``extras`` is the likelier, 0 the other."""
    runner, _ = open_tiny(TinyShape(vocab=VOCAB))
    _, logits = runner.logits(batch_of([]))
    bias = tuple(
        (token, wanted - float(logits[0, token])) for token, wanted in ((1, 4.0), (0, 3.0))
    )
    row = dataclasses.replace(extras, bias=bias, allowed=(0, 1))
    assert int(runner.execute(batch_of([row])).tokens[0]) == (1 if comes == "likelier" else 0)
