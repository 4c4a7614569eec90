"""How well weights are quantised: beside the plainest quantiser, which takes the extremes."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.numpy_gguf import dequantise, quantise


def error_of(meaning: Any, weight: Any) -> float:
    return float(np.sqrt(((meaning - weight) ** 2).mean()))


def packed_error(extension: Any, weight: Any, form: str) -> float:
    rows = np.arange(len(weight), dtype=np.int32)
    packed = extension.pack(
        extension.Arena(), [weight], "f32", weight.shape[1], rows, None, None, form, len(weight), 1
    )
    return error_of(packed.dequantise(), weight)


def test_8_bits_reach_to_the_extremes_and_no_further(extension: Any) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    plain = error_of(dequantise("q8_0", quantise("q8_0", weight)), weight)
    assert 0.99 * plain < packed_error(extension, weight, "q8") < 1.01 * plain


def test_4_bits_give_up_extremes_that_cost_more_than_they_are_worth(extension: Any) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    plain = error_of(dequantise("q4_1", quantise("q4_1", weight)), weight)
    assert packed_error(extension, weight, "q4_min") < 0.97 * plain
