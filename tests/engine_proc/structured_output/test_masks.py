"""Masks that are filled beside the step: whose they are, and who waits for whom."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from trioengine.engine_proc.runner import AllowMasks
from trioengine.engine_proc.structured_output.masks import MaskFiller
from trioengine.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from helpers.grammars import Judge
    from trioengine.engine_proc.request import Request
    from trioengine.engine_proc.runner import SamplingRows
    from trioengine.engine_proc.structured_output.grammar import GrammarState

VOCAB = 2048
PATTERNS = ["[ab]{9}", None, "[cd]{9}", "x", None, "[a-z ]{40}", "[0-9]+"]


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def filler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskFiller]:
    monkeypatch.setattr(
        "trioengine.engine_proc.structured_output.masks.usable_cpus", lambda: 4 * request.param
    )
    filler = MaskFiller(VOCAB)
    yield filler
    filler.close()


def states(judge: Judge) -> list[GrammarState | None]:
    return [
        None if pattern is None else judge.compile(StructuredOutput("regex", pattern)).begin()
        for pattern in PATTERNS
    ]


def fill(
    filler: MaskFiller, grammars: list[Any], allow: AllowMasks | None = None, rows: int = 8
) -> AllowMasks:
    """Fill masks for requests that have these grammars; the step has one row more than them."""
    requests = [SimpleNamespace(grammar=grammar) for grammar in grammars]
    step = SimpleNamespace(temperature=np.zeros(rows, np.float32), allow=allow)
    filler.fill(cast("list[Request]", requests), cast("SamplingRows", step))
    assert step.allow is not None
    return cast("AllowMasks", step.allow)


def expected(state: GrammarState) -> npt.NDArray[np.uint32]:
    return np.frombuffer(state.matcher.compute_bitmask(), np.uint32)[: VOCAB // 32]


def test_each_row_with_a_grammar_gets_its_own_mask(filler: MaskFiller, judge: Judge) -> None:
    grammars = states(judge)
    for _ in range(2):  # the second into the same memory
        allow = fill(filler, grammars)
        allow.wait()
        filler.settle()
        for row, state in enumerate(grammars):
            if state is None:
                assert allow.row_masks[row] == -1
            else:
                np.testing.assert_array_equal(allow.words[allow.row_masks[row]], expected(state))
                state.matcher.reset()
        assert allow.row_masks[len(grammars)] == -1
        grammars = grammars[::-1]


def test_a_grammar_allows_nothing_that_its_request_does_not(
    filler: MaskFiller, judge: Judge
) -> None:
    grammars = states(judge)
    before = np.random.default_rng(1).integers(0, 2**32, (3, VOCAB // 32), np.uint32)
    row_masks = np.array([2, 1, -1, -1, -1, 0, -1], np.int32)
    allow = fill(filler, grammars, AllowMasks(before.copy(), row_masks.copy()))
    allow.wait()
    filler.settle()
    for row, state in enumerate(grammars):
        within = before[row_masks[row]] if row_masks[row] >= 0 else ~np.uint32(0)
        if state is not None:
            mask = allow.words[allow.row_masks[row]]
            np.testing.assert_array_equal(mask, expected(state) & within)
    np.testing.assert_array_equal(allow.words[allow.row_masks[1]], before[1])


def test_one_that_raises_leaves_nothing_and_others_theirs(filler: MaskFiller, judge: Judge) -> None:
    good = judge.compile(StructuredOutput("regex", "[ab]{9}")).begin()
    fill(filler, [good, good]).wait()  # so that the memory is not empty
    filler.settle()
    allow = fill(filler, [SimpleNamespace(matcher=None), good])
    allow.wait()
    filler.settle()
    assert not allow.words[allow.row_masks[0]].any()
    np.testing.assert_array_equal(allow.words[allow.row_masks[1]], expected(good))


def test_masks_are_filled_beside_whoever_asked_for_them(filler: MaskFiller) -> None:
    may_fill, waiting, settled = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            may_fill.wait(10)

    allow = fill(filler, [SimpleNamespace(matcher=Slow())])  # returns although nothing is filled

    def settle() -> None:
        waiting.set()
        filler.settle()
        settled.set()

    threading.Thread(target=settle, daemon=True).start()
    assert waiting.wait(10)
    assert not settled.is_set()
    assert not any(part.done() for part in allow.filling)
    may_fill.set()
    assert settled.wait(10)
    assert all(part.done() for part in allow.filling)
