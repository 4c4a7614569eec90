"""Sampling of the extension, against a few lines of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.drawing import possible_draws
from trioengine.engine_proc.runner import NO_TOKEN

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]

RNG = np.random.default_rng(7)


def sample(
    extension: Any,
    logits: Float32Array,
    uniform: float,
    isa: str = "portable",
    masked: tuple[int, ...] = (),
    **params: Any,
) -> int:
    chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | params
    row = np.ascontiguousarray(logits, np.float32)[None].copy()
    masks = [(0, list(masked))] if masked else []
    columns = [[chosen[name]] for name in ("temperature", "top_p", "top_k", "min_p")]
    token: int = extension.sample(row, *columns, [uniform], masks, isa)[0]
    return token


def keep(logits: Float32Array, params: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return what a row may draw from, likeliest first, and the probabilities."""
    scores = logits.astype(np.float64) / params["temperature"]
    weights = np.exp(scores - scores.max())
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    kept = [int(i) for i in order if weights[i] >= params["min_p"]]
    kept = kept[: params["top_k"] or None]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i]
        if mass >= params["top_p"] * total:
            break
    if params["top_p"] == 1.0:
        nucleus = kept
    probabilities = weights[nucleus] / weights[nucleus].sum()
    return nucleus, probabilities.tolist()


LOGITS = arrays(
    np.float32, st.integers(1, 300), elements=st.floats(-8, 8, width=16, allow_subnormal=False)
)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.25, 3.0, width=16),
        "top_p": st.sampled_from([1.0, 0.3, 0.9, 0.99]),
        "top_k": st.sampled_from([0, 1, 2, 5, 64, 250]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


@given(logits=LOGITS, params=PARAMS, uniform=st.floats(0, 1, exclude_max=True))
def test_drawing_is_from_what_is_kept(
    extension: Any, logits: Float32Array, params: dict[str, Any], uniform: float
) -> None:
    token = sample(extension, logits, uniform, **params)
    if params["min_p"] == 0.0 and (params["top_k"] == 0 or params["top_k"] >= len(logits)):
        temperature, top_p = params["temperature"], params["top_p"]
        assert token in possible_draws(logits, temperature, top_p, uniform)
        return
    nucleus, probabilities = keep(logits, params)  # few: drawn by the inverse CDF in this order
    cdf = np.concatenate([[0.0], np.cumsum(probabilities)])
    # A token on the edge of the nucleus, or a uniform on the edge of a token, may fall either way.
    edges = [i for i in range(len(nucleus)) if cdf[i] - 1e-5 <= uniform <= cdf[i + 1] + 1e-5]
    near = {float(logits[nucleus[i]]) for i in edges}
    assert float(logits[token]) in near or len(nucleus) == 1


@given(logits=LOGITS)
def test_greedy_takes_the_first_of_the_likeliest(extension: Any, logits: Float32Array) -> None:
    assert sample(extension, logits, 0.0, temperature=0.0) == int(np.argmax(logits))


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.02}])
def test_frequencies_follow_probabilities(extension: Any, isa: str, params: dict[str, Any]) -> None:
    logits = (2.0 * RNG.standard_normal(500)).astype(np.float32)
    full = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | params
    nucleus, probabilities = keep(logits, full)
    expected = np.zeros(500)
    expected[nucleus] = probabilities
    draws = 1000
    columns = [[full[name]] * draws for name in ("temperature", "top_p", "top_k", "min_p")]
    uniforms_ = ((np.arange(draws) + 0.5) / draws).tolist()
    drawn = extension.sample(np.tile(logits, (draws, 1)), *columns, uniforms_, [], isa)
    counts = np.bincount(drawn, minlength=500) / draws
    # Stratified uniforms: every count is right to within one draw on either side. What is drawn
    # again, because it was not in the nucleus, is left to chance: within five deviations.
    chance = 5 * np.sqrt((1 - full["top_p"]) * expected / draws)
    assert (np.abs(counts - expected) <= 2.5 / draws + chance).all()


def test_masked_tokens_are_never_taken(extension: Any) -> None:
    logits = RNG.standard_normal(200).astype(np.float32)
    likeliest = np.argsort(-logits)
    masked = tuple(int(i) for i in likeliest[:70])
    for params in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        for uniform in (0.0, 0.3, 0.999999):
            token = sample(extension, logits, uniform, masked=masked, **params)
            assert token not in masked
    assert sample(extension, logits, 0.0, masked=masked, temperature=0.0) == likeliest[70]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_broken_logits_still_give_a_token(
    extension: Any, params: dict[str, Any], value: float
) -> None:
    for logits in (np.full(100, value, np.float32), np.array([0.0, value, 1.0], np.float32)):
        token = sample(extension, logits, 0.5, **params)
        if (logits == -np.inf).all():
            assert token == NO_TOKEN
        else:
            assert 0 <= token < len(logits)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 3e38])
def test_extreme_temperatures(extension: Any, temperature: float) -> None:
    logits = RNG.standard_normal(300).astype(np.float32)
    token = sample(extension, logits, 0.5, temperature=temperature)
    assert (token == int(np.argmax(logits))) or temperature > 1.0


def test_a_flat_distribution_needs_more_than_its_head(extension: Any) -> None:
    logits = np.zeros(5000, np.float32)
    logits[:10] = 15.0  # e^15 each: together most of the mass, but not 0.9999 of it
    logits[10:] = 4.0
    drawn = {sample(extension, logits, u, top_p=0.99999) for u in np.linspace(0, 0.9999999, 2000)}
    assert max(drawn) >= 10


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": [1.0, 1.0]}, "one parameter per row"),
        ({"masks": [(0, [9])]}, "masked_token_ids"),
        ({"masks": [(2**40, [1])]}, "out of range"),
        ({"isa": "mmx"}, "cannot be used here"),
    ],
)
def test_sampling_checks_its_arguments(
    extension: Any, arguments: dict[str, Any], match: str
) -> None:
    good: dict[str, Any] = {
        "logits": np.zeros((1, 4), np.float32),
        "temperature": [1.0],
        "top_p": [1.0],
        "top_k": [0],
        "min_p": [0.0],
        "uniforms": [0.5],
        "masks": [],
        "isa": "portable",
    }
    with pytest.raises(ValueError, match=match):
        extension.sample(**(good | arguments))
