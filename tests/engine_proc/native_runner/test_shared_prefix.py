"""Sequences that begin with the same blocks attend together, and get the bits they get alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.numpy_llama import NumpyLlama, TinyShape, make_batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.native_runner.model_runner import NativeModelRunner

    Part = tuple[list[int], int, list[int]]

SHAPES = {
    "gqa3": TinyShape(head_dim=64, heads=9, kv_heads=3, hidden=96, layers=2),
    "window": TinyShape("mistral", window=200, head_dim=32, heads=6, kv_heads=2),
    "alone in a tile": TinyShape(heads=40, kv_heads=2, head_dim=16, layers=1),
}
EXAMPLES = {"portable": 3, "avx2": 6, "avx512": 10, "avx512_bf16": 10, "amx": 15}
TOKENS = np.random.default_rng(5).integers(0, 203, 400).tolist()


class Families:
    """Prompts in the cache, each going on from an earlier one's first blocks, or from none's."""

    def __init__(self, runner: NativeModelRunner, seed: int) -> None:
        self._runner = runner
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(runner.num_blocks).tolist()
        self.parts: list[Part] = []

    def add(self, length: int, parent: int | None, shared_blocks: int) -> None:
        """Prefill ``length`` tokens, of which the last is left to be decoded."""
        tokens, blocks = self._rng.integers(0, 203, length).tolist(), []
        if parent is not None and self.parts:
            older = self.parts[parent % len(self.parts)]
            whole = min(shared_blocks, older[1] // 16, (length - 1) // 16)
            tokens[: whole * 16] = older[0][: whole * 16]
            blocks = older[2][:whole]
        start = len(blocks) * 16
        blocks = blocks + [self._free.pop() for _ in range(-(-length // 16) - len(blocks))]
        if start < length - 1:
            self._runner.execute(make_batch([(tokens[start:-1], start, blocks)]))
        self.parts.append((tokens, length - 1, blocks))

    def decode(self, chosen: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits of the last token of each chosen prompt, computed in one step."""
        parts = [(self.parts[i][0][-1:], self.parts[i][1], self.parts[i][2]) for i in chosen]
        logits: npt.NDArray[np.float32] = self._runner.logits(make_batch(parts))[1]
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_company_with_common_blocks_changes_no_bit(
    open_tiny: OpenTiny, isa: str, name: str
) -> None:
    runners = [
        open_tiny(SHAPES[name], isa=isa, threads=n, kv_cache_memory_gib=0.06)[0] for n in (1, 3)
    ]

    @settings(max_examples=EXAMPLES[isa])
    @given(
        prompts=st.lists(
            st.tuples(
                st.integers(2, 420),
                st.one_of(st.none(), st.integers(0, 5)),
                st.integers(0, 26),
            ),
            min_size=2,
            max_size=14,
        ),
        seed=st.integers(0, 2**32),
    )
    def check(prompts: list[tuple[int, int | None, int]], seed: int) -> None:
        for runner in runners:
            families = Families(runner, seed)
            for prompt in prompts:
                families.add(*prompt)
            order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
            together = families.decode(order)
            for row, i in enumerate(order):
                np.testing.assert_array_equal(
                    together[row].view(np.uint32), families.decode([i])[0].view(np.uint32)
                )

    check()


@pytest.mark.parametrize("count", [2, 9, 16, 33])
def test_a_long_common_prefix(open_tiny: OpenTiny, isa: str, count: int) -> None:
    runner, model = open_tiny(SHAPES["gqa3"], isa=isa)
    prefix, own = TOKENS[:272], [TOKENS[300 + i : 303 + i] for i in range(count)]
    shared = list(range(17))
    runner.execute(make_batch([(prefix, 0, shared)]))
    tables = [[*shared, 20 + i] for i in range(count)]
    parts = [(t[:2], 272, table) for t, table in zip(own, tables, strict=True)]
    runner.execute(make_batch(parts))
    parts = [(t[2:], 274, table) for t, table in zip(own, tables, strict=True)]
    logits = runner.logits(make_batch(parts))[1]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(logits[i], runner.logits(make_batch([part]))[1][0])
    expected = model.logits([*prefix, *own[-1]])[-1]
    assert np.abs(logits[-1] - expected).max() < 0.05 * expected.std()


def test_a_broken_neighbour_breaks_itself_only(open_tiny: OpenTiny, isa: str) -> None:
    """Even where it shares the first blocks, what it alone sees stays its own."""
    model = NumpyLlama(SHAPES["gqa3"])
    model.tensors["model.embed_tokens.weight"][7] = np.nan
    runner, _ = open_tiny(model, isa=isa)
    prefix, shared = [token % 7 for token in TOKENS[:256]], list(range(16))
    runner.execute(make_batch([(prefix, 0, shared)]))
    healthy = ([3], 256, [*shared, 20])
    expected = runner.logits(make_batch([healthy]))[1]
    logits = runner.logits(make_batch([([7], 256, [*shared, 21]), healthy]))[1]
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1], expected[0])
