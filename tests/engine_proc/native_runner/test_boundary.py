"""Whatever step Python hands to the extension: a clean refusal or a clean result, never a crash.

What these find they find best under the sanitizers (``nox -s sanitizers``), where a read or write
beyond an array ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from helpers.numpy_llama import TinyShape, greedy_rows, make_batch
from helpers.odd_arrays import REFUSALS, integers, misaligned, odd_arrays
from trioengine.engine_proc.runner import NO_TOKEN, AllowMasks, LogitBias, Penalties

if TYPE_CHECKING:
    import numpy.typing as npt

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import StepBatch

VOCAB: Final = 203
MAX_TOKENS: Final = 48
BATCH: Final = (
    "token_ids",
    "positions",
    "query_start",
    "seq_lens",
    "block_tables",
    "logits_rows",
)
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "seeds", "positions")


def sound_batch(draw: st.DrawFn) -> StepBatch:
    """Up to three sequences of a few tokens, each on blocks of its own."""
    parts = []
    for index in range(draw(st.integers(1, 3))):
        length, start = draw(st.integers(1, 12)), draw(st.integers(0, 20))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
        parts.append((tokens, start, [3 * index, 3 * index + 1, 3 * index + 2]))
    batch = make_batch(parts, all_rows=draw(st.booleans()))
    rows, count = batch.sampling, len(batch.logits_rows)
    entries = np.full(count, VOCAB - 1, np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    some = np.full(count, 0.5, np.float32)
    if draw(st.booleans()):
        rows.allow = AllowMasks(np.full((2, 7), 5, np.uint32), entries % 3 - 1)
    if draw(st.booleans()):
        rows.bias = LogitBias(starts, entries, some)
    if draw(st.booleans()):
        rows.penalties = Penalties(some, some, some, starts, entries, entries % 3)
    if draw(st.booleans()):
        rows.logprobs_k, rows.targets = entries % 5 - 1, entries.copy()
    return batch


def arrays_of(batch: StepBatch) -> list[tuple[Any, str]]:
    """Return every array of a batch: its owner and its name."""
    rows = batch.sampling
    owned = [(batch, name) for name in BATCH] + [(rows, name) for name in SAMPLING]
    owned += [(rows, name) for name in ("logprobs_k", "targets") if getattr(rows, name) is not None]
    edits: list[Any] = [
        part for part in (rows.allow, rows.bias, rows.penalties) if part is not None
    ]
    return owned + [(part, name) for part in edits for name in part.__slots__]


def break_something(draw: st.DrawFn, batch: StepBatch) -> None:
    owner, name = draw(st.sampled_from(arrays_of(batch)))
    array = getattr(owner, name)
    if not isinstance(array, np.ndarray):  # broken already
        return
    array = array.copy()
    match draw(st.sampled_from(["item", "item", "odd", "length", "rows", "masks", "nothing"])):
        case "item" if array.size:
            index = draw(st.integers(0, array.size - 1))
            with np.errstate(all="ignore"):
                value = draw(st.floats(width=32) if array.dtype.kind == "f" else integers)
                array.flat[index] = np.array(value).astype(array.dtype)
            setattr(owner, name, array)
        case "odd":
            same = odd_arrays((array.dtype.str,))
            setattr(owner, name, draw(st.one_of(odd_arrays(), same, st.none(), st.just("text"))))
        case "length":
            setattr(owner, name, np.resize(array, draw(st.integers(0, 60))))
        case "rows":
            batch.logits_rows = np.zeros(draw(st.integers(0, 300)), np.int32)
            batch.sampling = greedy_rows([1] * len(batch.logits_rows))
        case "masks":
            masks = st.lists(st.tuples(integers, st.lists(integers)), max_size=3)
            batch.sampling.masked_token_ids = draw(st.one_of(masks, st.just([(0, ["x"])])))
        case _:
            pass


@st.composite
def broken_batches(draw: st.DrawFn) -> StepBatch:
    batch = sound_batch(draw)
    for _ in range(draw(st.integers(1, 3))):
        break_something(draw, batch)
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TinyShape(), TinyShape("mistral", window=5, bias=True)])
def test_any_batch_is_computed_or_refused(
    open_tiny: OpenTiny, extension: Any, shape: TinyShape
) -> None:
    """On every instruction set of this machine: to draw a batch takes longer than to compute it."""
    healthy = make_batch(
        [(list(range(30)), 0, [20, 21]), (list(range(10)), 0, [22])], all_rows=True
    )
    runners = {
        isa: open_tiny(shape, isa=isa, max_num_batched_tokens=MAX_TOKENS)[0]
        for isa in extension.usable_isas()
    }
    expected = {isa: runner.logits(healthy)[1] for isa, runner in runners.items()}

    @given(batch=broken_batches())
    def check(batch: StepBatch) -> None:
        for isa, runner in runners.items():
            note(isa)
            with contextlib.suppress(*REFUSALS):
                result, logits = runner.logits(batch)
                assert logits.shape == (len(batch.logits_rows), VOCAB)
                assert ((result.tokens >= NO_TOKEN) & (result.tokens < VOCAB)).all()
            after = runner.logits(healthy)[1]
            np.testing.assert_array_equal(after.view(np.uint32), expected[isa].view(np.uint32))

    check()


def test_more_rows_than_tokens_in_a_step_are_refused(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny(max_num_batched_tokens=MAX_TOKENS)
    batch = make_batch([([1, 2, 3], 0, [1])])
    batch.logits_rows = np.zeros(MAX_TOKENS + 1, np.int32)
    batch.sampling = greedy_rows([1] * (MAX_TOKENS + 1))
    with pytest.raises(ValueError, match="49 logits rows exceed the limit of 48"):
        runner.execute(batch)


def test_misaligned_arrays_are_refused(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny()
    batch = make_batch([([1, 2, 3], 0, [1])])
    batch.token_ids = misaligned(batch.token_ids)
    with pytest.raises(ValueError, match="token_ids is not aligned"):
        runner.execute(batch)


# What changes logits ------------------------------------------------------------------------------


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def floats(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def bias(
    starts: npt.NDArray[np.int32] | None = None, token: int = 5, value: float = 1.0
) -> LogitBias:
    return LogitBias(ints(0, 1, 2) if starts is None else starts, ints(4, token), floats(1, value))


def penalties(token: int = 5, count: int = 1, **changes: npt.NDArray[Any]) -> Penalties:
    sound = Penalties(
        presence=floats(1, 1),
        frequency=floats(1, 1),
        repetition=floats(1, 1),
        starts=ints(0, 1, 2),
        token_ids=ints(4, token),
        counts=ints(1, count),
    )
    return dataclasses.replace(sound, **changes)


EDITS: Final[dict[str, tuple[str, Any, str]]] = {
    "too few words": (
        "allow", AllowMasks(np.ones((1, 6), np.uint32), ints(0, 0)), "do not fit the vocabulary",
    ),
    "no such mask": (
        "allow", AllowMasks(np.ones((1, 7), np.uint32), ints(0, 1)), r"row_masks\[1\] is 1",
    ),
    "mask -2": (
        "allow", AllowMasks(np.ones((1, 7), np.uint32), ints(-2, 0)), r"row_masks\[0\] is -2",
    ),
    "bias begins late": ("bias", bias(ints(1, 1, 2)), "must begin with 0"),
    "bias falls": ("bias", bias(ints(0, 3, 2)), r"bias.starts\[2\] falls"),
    "bias ends early": ("bias", bias(ints(0, 1, 1)), "must end with the number of entries"),
    "bias of no token": ("bias", bias(token=203), r"bias.token_ids\[1\] is 203"),
    "bias of token -1": ("bias", bias(token=-1), r"bias.token_ids\[1\] is -1"),
    "bias of nan": ("bias", bias(value=np.nan), r"bias.values\[1\]"),
    "penalties fall": ("penalties", penalties(starts=ints(0, 3, 2)), r"starts\[2\] falls"),
    "penalty of no token": ("penalties", penalties(token=203), r"penalties.token_ids\[1\] is 203"),
    "counted -1 times": ("penalties", penalties(count=-1), r"penalties.counts\[1\] is -1"),
    "presence nan": ("penalties", penalties(presence=floats(0, np.nan)), r"presence\[1\]"),
    "frequency nan": ("penalties", penalties(frequency=floats(np.nan, 0)), r"penalties.frequency"),
    "repetition 0": ("penalties", penalties(repetition=floats(1, 0)), r"penalties.repetition\[1\]"),
    "logprobs -2": ("logprobs_k", ints(0, -2), r"logprobs_k\[1\] is -2"),
    "logprobs of more than all": ("logprobs_k", ints(0, 204), r"logprobs_k\[1\] is 204"),
    "no such target": ("targets", ints(203, 0), r"targets\[0\] is 203"),
    "target -2": ("targets", ints(0, -2), r"targets\[1\] is -2"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_edits_of_logits_that_make_no_sense_are_refused(open_tiny: OpenTiny, case: str) -> None:
    name, value, match = EDITS[case]
    runner, _ = open_tiny()
    batch = make_batch([([1, 2, 3], 0, [1]), ([4], 0, [2])])
    setattr(batch.sampling, name, value)
    with pytest.raises(ValueError, match=match):
        runner.execute(batch)
