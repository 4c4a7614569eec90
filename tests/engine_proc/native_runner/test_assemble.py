from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("trioengine.engine_proc.native_runner._native")

from helpers.numpy_llama import NumpyLlama, TinyShape
from trioengine.engine_proc.native_runner.assemble import (
    _head_rows,
    _interleaved_rows,
    build_model,
    padded_head_dim,
)
from trioengine.engine_proc.native_runner.config import read_config
from trioengine.engine_proc.native_runner.weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_heads_are_padded_to_whole_groups() -> None:
    assert [padded_head_dim(d) for d in (2, 32, 34, 64, 80)] == [32, 32, 64, 64, 96]


def test_a_split_head_pads_each_half() -> None:
    rows = _head_rows(2, 6, split=True).reshape(2, 2, 16)
    assert rows[0, 0, :3].tolist() == [0, 1, 2]
    assert rows[0, 1, :3].tolist() == [3, 4, 5]
    assert rows[1, 0, :3].tolist() == [6, 7, 8]
    assert (rows[:, :, 3:] == -1).all()


def test_a_whole_head_is_padded_at_its_end() -> None:
    rows = _head_rows(2, 6, split=False).reshape(2, 32)
    assert rows[1, :6].tolist() == [6, 7, 8, 9, 10, 11]
    assert (rows[:, 6:] == -1).all()


def test_heads_that_fit_are_left_in_order() -> None:
    for split in (False, True):
        np.testing.assert_array_equal(_head_rows(3, 64, split=split), np.arange(192))


def test_gate_and_up_alternate_in_runs_of_16() -> None:
    rows = _interleaved_rows(40).reshape(-1, 16)
    assert rows[0].tolist() == list(range(16))
    assert rows[1].tolist() == list(range(40, 56))
    assert rows[2].tolist() == list(range(16, 32))
    assert rows[4].tolist() == [*range(32, 40), *[-1] * 8]
    assert len(rows) == 8  # 40 is padded to 64


@pytest.mark.parametrize(
    ("quantization", "layer_bytes", "head_bytes"),
    [("none", 64, 64), ("int8", 34, 34), ("q4", 20, 34)],
)
def test_layers_and_head_have_the_formats_of_their_quantization(
    tmp_path: Path, quantization: str, layer_bytes: int, head_bytes: int
) -> None:
    """32 weights are so many bytes; the embedding stays in bfloat16."""
    shape = TinyShape(
        layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=160
    )
    NumpyLlama(shape).write(tmp_path)
    builder = build_model(
        read_config(tmp_path),
        Checkpoint(tmp_path),
        quantization=quantization,
        max_model_len=16,
        threads=1,
        progress=lambda fraction: None,
    )
    outputs = 64 + 32 + 32 + 64 + 2 * 64 + 64  # all of 64 inputs: two groups each
    expected = 2 * outputs * layer_bytes + 2 * 160 * head_bytes + 160 * 64 * 2
    assert builder.weight_bytes == expected
