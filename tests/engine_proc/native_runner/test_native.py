"""Weights and products of the extension, each against a few lines of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.numpy_gguf import dequantise, quantise
from helpers.numpy_llama import round_bf16
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


# Quantised weights --------------------------------------------------------------------------------


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
