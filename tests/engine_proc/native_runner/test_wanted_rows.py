"""The last layer computes the rows alone whose logits are wanted: they are the same to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.numpy_llama import TinyShape, greedy_rows, make_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner
    from trioengine.engine_proc.runner import StepBatch

    Part = tuple[list[int], int, list[int]]

SHAPES = {
    "gqa3": TinyShape(head_dim=64, heads=9, kv_heads=3, hidden=96, layers=2),
    "window": TinyShape("mistral", window=40, head_dim=32, heads=6, kv_heads=1),
    "one layer": TinyShape("qwen3", head_norm=True, head_dim=128, layers=1),
    "biases": TinyShape("qwen2", bias=True, heads=7, kv_heads=1),
}
TOKENS = np.random.default_rng(8).integers(0, 203, 400).tolist()
# Three decodes, the last chunk of one prompt, and all of another: rows 0, 1..90, 91, 92..161, 162.
PARTS: list[Part] = [
    (TOKENS[40:41], 40, [0, 1, 2]),
    (TOKENS[140:230], 140, list(range(3, 18))),
    (TOKENS[17:18], 17, [18, 19]),
    (TOKENS[300:370], 0, list(range(20, 25))),
    (TOKENS[200:201], 200, list(range(25, 38))),
]
WANTED = {
    "the last of each sequence": [0, 90, 91, 161, 162],
    "chunks without a row": [0, 91, 162],
    "one of all": [161],
    "some of a prompt, with gaps": [1, 2, 3, 50, 90, 92, 94, 95, 96, 97, 161],
    "any order, some twice": [162, 90, 5, 90, 0, 5],
    "all but one": [*range(100), *range(101, 163)],
    "a few more than a tile": list(range(100, 133)),
}


def with_rows(parts: Sequence[Part], rows: Sequence[int]) -> StepBatch:
    batch = make_batch(parts)
    batch.logits_rows = np.array(rows, np.int32)
    batch.sampling = greedy_rows([1] * len(rows))
    return batch


def fill_cache(runner: NativeModelRunner) -> None:
    """Compute what the parts have before them."""
    for _, position, blocks in PARTS:
        if position > 0:
            runner.execute(make_batch([(TOKENS[:position], 0, blocks)]))


def everything(runner: NativeModelRunner) -> npt.NDArray[np.float32]:
    logits: npt.NDArray[np.float32] = runner.logits(make_batch(PARTS, all_rows=True))[1]
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_the_same_bits_whichever_are_wanted(
    open_tiny: OpenTiny, isa: str, name: str
) -> None:
    for threads in (1, 3):
        runner, _ = open_tiny(SHAPES[name], isa=isa, threads=threads)
        fill_cache(runner)
        expected = everything(runner)
        for rows in WANTED.values():
            _, logits = runner.logits(with_rows(PARTS, rows))
            np.testing.assert_array_equal(logits.view(np.uint32), expected[rows].view(np.uint32))


@pytest.mark.parametrize("chunk", [5, 8, 9, 64])
@pytest.mark.parametrize("quantization", ["none", "q4"])
def test_a_chunk_without_a_row_leaves_its_keys_and_values(
    open_tiny: OpenTiny, isa: str, chunk: int, quantization: str
) -> None:
    """Also of so few tokens that each thread norms them for itself."""
    runner, _ = open_tiny(SHAPES["gqa3"], isa=isa, quantization=quantization)
    tokens, blocks, others = TOKENS[:130], list(range(9)), list(range(9, 18))
    _, expected = runner.logits(make_batch([(tokens, 0, blocks)]))
    for start in range(0, 128, chunk):
        part = (tokens[start : min(start + chunk, 128)], start, others)
        assert runner.execute(with_rows([part], [])).tokens.shape == (0,)
    _, logits = runner.logits(make_batch([(tokens[128:], 128, others)]))
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("rows", [[199], [3, 199], list(range(150, 200))])
def test_quantised_weights_give_the_same_bits(
    open_tiny: OpenTiny, isa: str, rows: list[int]
) -> None:
    runner, _ = open_tiny(SHAPES["gqa3"], isa=isa, quantization="q4")
    part = (TOKENS[:200], 0, list(range(13)))
    _, expected = runner.logits(make_batch([part], all_rows=True))
    _, logits = runner.logits(with_rows([part], rows))
    np.testing.assert_array_equal(logits.view(np.uint32), expected[rows].view(np.uint32))
