"""The parts of the extension, each against a few lines of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.numpy_gguf import dequantise, quantise
from helpers.numpy_llama import round_bf16
from trioengine.engine_proc.runner import NO_TOKEN
from trioengine.engine_proc.uniform import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32Array = npt.NDArray[np.float32]

RNG = np.random.default_rng(7)


def bf16_bits(values: Any) -> npt.NDArray[np.uint16]:
    return (round_bf16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def padded_rows(count: int) -> npt.NDArray[np.int32]:
    rows = np.full(-(-count // 16) * 16, -1, np.int32)
    rows[:count] = np.arange(count)
    return rows


def pack_bf16(extension: Any, weight: Any, bias: Any = None, inputs: Any = None) -> Any:
    rows = padded_rows(len(weight))
    return extension.pack(
        extension.Arena(),
        [bf16_bits(weight)],
        "bf16",
        weight.shape[1],
        rows,
        inputs,
        bias,
        "bf16",
        len(weight),
        1,
    )


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (37, 45), (100, 200)])
def test_packed_weights_mean_what_they_meant(
    extension: Any, kind: str, shape: tuple[int, int]
) -> None:
    weight = round_bf16(RNG.standard_normal(shape))
    data = {
        "bf16": bf16_bits(weight),
        "f16": weight.astype(np.float16).view(np.uint16),
        "f32": weight,
    }[kind]
    rows = padded_rows(shape[0])
    packed = extension.pack(
        extension.Arena(), [data], kind, shape[1], rows, None, None, "bf16", shape[0], 2
    )
    expected = np.zeros((-(-shape[0] // 16) * 16, -(-shape[1] // 32) * 32), np.float32)
    expected[: shape[0], : shape[1]] = (
        round_bf16(weight.astype(np.float16)) if kind == "f16" else weight
    )
    np.testing.assert_array_equal(packed.dequantise(), expected)
    assert (packed.outputs, packed.inputs) == (shape[0], expected.shape[1])


def test_rows_and_inputs_go_where_they_are_sent(extension: Any) -> None:
    first, second = round_bf16(RNG.standard_normal((2, 3, 4)))
    rows = np.full(16, -1, np.int32)
    rows[[0, 5]] = [4, 1]  # row 4 of the stack is row 1 of the second matrix
    inputs = np.array([3, -1, 0], np.int32)
    sources = [bf16_bits(first), bf16_bits(second)]
    packed = extension.pack(
        extension.Arena(), sources, "bf16", 4, rows, inputs, None, "bf16", 16, 1
    )
    expected = np.zeros((16, 32), np.float32)
    expected[0, [0, 2]] = second[1, [3, 0]]
    expected[5, [0, 2]] = first[1, [3, 0]]
    np.testing.assert_array_equal(packed.dequantise(), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": np.full(15, 0, np.int32)}, "multiple of 16"),
        ({"rows": np.full(16, 3, np.int32)}, r"row index 3 is not in \[-1, 3\)"),
        ({"rows": np.full(16, -2, np.int32)}, "row index -2"),
        ({"rows": np.zeros(16, np.int64)}, "rows has the wrong dtype"),
        ({"rows": np.zeros(32, np.int32)[::2]}, "not C-contiguous"),
        ({"rows": np.zeros((1, 16), np.int32)}, "must have 1 dimensions"),
        ({"inputs": np.array([4], np.int32)}, "input index 4"),
        ({"bias": np.zeros(3, np.float32)}, "one bias per output"),
        ({"bias": np.zeros(16, np.float64)}, "bias has the wrong dtype"),
        ({"sources": [np.zeros((3, 5), np.uint16)]}, "given number of columns"),
        ({"sources": [np.zeros((3, 4), np.float32)]}, "source has the wrong dtype"),
        ({"sources": [np.zeros((4, 3), np.uint16).T]}, "not C-contiguous"),
        ({"columns": 0}, "columns are out of range"),
        ({"columns": 2**40}, "columns are out of range"),
        ({"source_type": "int3"}, "unknown source type"),
        ({"format": "q2"}, "unknown format"),
        ({"format": "q4"}, "read, not made"),
        ({"outputs": 17}, "real outputs"),
        ({"threads": 0}, "threads"),
    ],
)
def test_packing_checks_everything(extension: Any, change: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {
        "arena": extension.Arena(),
        "sources": [np.zeros((3, 4), np.uint16)],
        "source_type": "bf16",
        "columns": 4,
        "rows": np.zeros(16, np.int32),
        "inputs": None,
        "bias": None,
        "format": "bf16",
        "outputs": 16,
        "threads": 1,
    }
    with pytest.raises(ValueError, match=match):
        extension.pack(**(arguments | change))


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (130, 72), (203, 1000)])
def test_products_equal_numpys(extension: Any, isa: str, shape: tuple[int, int]) -> None:
    weight = round_bf16(RNG.standard_normal(shape))
    bias = RNG.standard_normal(-(-shape[0] // 16) * 16).astype(np.float32)
    packed = pack_bf16(extension, weight, bias)
    x = np.zeros((35, packed.inputs), np.float32)
    x[:, : shape[1]] = round_bf16(RNG.standard_normal((35, shape[1])))
    y = extension.multiply(packed, x, isa)[:, : shape[0]]
    expected = x[:, : shape[1]].astype(np.float64) @ weight.T + bias[: shape[0]]
    # Inputs may be rounded to bf16 once more after a multiplication by 1 ± 1e-6.
    np.testing.assert_allclose(y, expected, atol=2e-3 * shape[1] ** 0.5, rtol=0)


def test_a_row_does_not_depend_on_its_batch(extension: Any, isa: str) -> None:
    packed = pack_bf16(extension, RNG.standard_normal((112, 160)))
    x = RNG.standard_normal((70, 160)).astype(np.float32)
    whole = extension.multiply(packed, x, isa)
    for count in (*range(1, 36), 64):
        start = int(RNG.integers(0, 70 - count))
        part = extension.multiply(packed, np.ascontiguousarray(x[start : start + count]), isa)
        np.testing.assert_array_equal(part, whole[start : start + count])


# Quantised weights ------------------------------------------------------------------------------

BLOCKS = {"q4_0": "q4", "q4_1": "q4_min", "q8_0": "q8"}


def pack_blocks(extension: Any, kind: str, weight: Float32Array) -> Any:
    data = quantise(kind, weight)
    rows = padded_rows(len(weight))
    return extension.pack(
        extension.Arena(),
        [data],
        kind,
        weight.shape[1],
        rows,
        None,
        None,
        BLOCKS[kind],
        len(weight),
        1,
    )


def round_activations(x: Float32Array) -> npt.NDArray[np.float64]:
    """Round to 8 bits with one scale per 32 neighbours."""
    groups = x.reshape(len(x), -1, 32).astype(np.float64)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    codes = np.rint(groups / np.where(scale == 0, 1, scale))
    rounded: npt.NDArray[np.float64] = codes * scale
    return rounded.reshape(len(x), -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_packed_blocks_mean_what_they_meant(extension: Any, kind: str) -> None:
    weight = RNG.standard_normal((40, 160)).astype(np.float32)
    packed = pack_blocks(extension, kind, weight)
    expected = dequantise(kind, quantise(kind, weight))
    np.testing.assert_allclose(packed.dequantise()[:40], expected, rtol=1e-6, atol=1e-7)
    assert packed.format == BLOCKS[kind]
    assert (packed.dequantise()[40:] == 0).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_can_be_unpacked_to_bf16(extension: Any, kind: str) -> None:
    data = quantise(kind, RNG.standard_normal((16, 64)).astype(np.float32))
    inputs = RNG.permutation(64).astype(np.int32)
    packed = extension.pack(
        extension.Arena(), [data], kind, 64, padded_rows(16), inputs, None, "bf16", 16, 1
    )
    expected = round_bf16(dequantise(kind, data)[:, inputs])
    np.testing.assert_array_equal(packed.dequantise(), expected)


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_products_equal_numpys(extension: Any, isa: str, kind: str) -> None:
    weight = RNG.standard_normal((72, 224)).astype(np.float32)
    weight[5, :32] = 0.0
    packed = pack_blocks(extension, kind, weight)
    x = RNG.standard_normal((40, 224)).astype(np.float32)
    x[3, 64:96] = 0.0
    y = extension.multiply(packed, x, isa)
    meaning = dequantise(kind, quantise(kind, weight)).astype(np.float64)
    # The way in multiplies by 1 ± 1e-6, which moves a few activations by one code.
    np.testing.assert_allclose(y[:, :72], round_activations(x) @ meaning.T, atol=0.05)
    for count in (1, 2, 5, 7, 17):
        part = extension.multiply(packed, x[20 : 20 + count].copy(), isa)
        np.testing.assert_array_equal(part, y[20 : 20 + count])


@pytest.mark.parametrize(("form", "bound"), [("q8", 0.006), ("q4_min", 0.1)])
def test_weights_are_quantised_closely(extension: Any, form: str, bound: float) -> None:
    weight = RNG.standard_normal((64, 256)).astype(np.float32)
    weight[1] *= 1e-6
    weight[2] = 0.0
    packed = extension.pack(
        extension.Arena(), [weight], "f32", 256, padded_rows(64), None, None, form, 64, 1
    )
    error = packed.dequantise() - weight
    rms = np.sqrt((error**2).mean(-1)) / np.maximum(np.sqrt((weight**2).mean(-1)), 1e-30)
    assert rms[0] < bound
    assert np.median(rms) < bound
    assert (packed.dequantise()[2] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_broken_weights_are_quantised_to_something(extension: Any, value: float) -> None:
    weight = np.ones((16, 32), np.float32)
    weight[0, 0] = value
    for form in ("q8", "q4_min"):
        packed = extension.pack(
            extension.Arena(), [weight], "f32", 32, padded_rows(16), None, None, form, 16, 1
        )
        np.testing.assert_allclose(packed.dequantise()[1:], 1.0, rtol=1e-2)


def test_uniforms_are_those_of_python(extension: Any) -> None:
    seeds = RNG.integers(0, 2**64, 100, dtype=np.uint64)
    positions = RNG.integers(0, 2**31, 100)
    expected = uniforms(seeds, positions)
    ours = [extension.uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    np.testing.assert_array_equal(ours, expected)


# Sampling -----------------------------------------------------------------------------------------


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
    """Return what a row may draw from, in the order of drawing, and the probabilities."""
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
    keeps_all = params["top_k"] == 0 or params["top_k"] >= len(logits)
    if params["top_p"] == 1.0 and params["min_p"] == 0.0 and keeps_all:
        nucleus = sorted(nucleus)  # nothing to rank: drawn in the order of ids
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
def test_drawing_is_an_inverse_cdf_over_what_is_kept(
    extension: Any, logits: Float32Array, params: dict[str, Any], uniform: float
) -> None:
    nucleus, probabilities = keep(logits, params)
    token = sample(extension, logits, uniform, **params)
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
    # Stratified uniforms: every count is right to within one draw on either side.
    np.testing.assert_allclose(counts, expected, atol=2.5 / draws)


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
