from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.numpy_llama import NumpyLlama, TinyShape, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import StepBatch

SHAPES = {
    "tails": TinyShape(),
    "tied": TinyShape(head_dim=64, heads=4, kv_heads=4, hidden=64, tied=True, vocab=256),
    "qwen2": TinyShape("qwen2", bias=True, heads=7, kv_heads=1),
    "qwen3": TinyShape("qwen3", head_norm=True, head_dim=128),
    "window": TinyShape("mistral", window=24, head_dim=32),
    "nope": TinyShape("smollm3", nope=(1,)),
    "many-heads": TinyShape(mlp_bias=True, heads=40, kv_heads=2, head_dim=16),
    "wide-head": TinyShape(heads=2, kv_heads=1, head_dim=256, layers=1),
    "smollm2": TinyShape(heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=160, layers=1),
}
ROUNDED = {"amx", "avx512_bf16"}  # multiply bf16 activations: three significant digits
BLOCKS = [5, 3, 7, 9, 1, 2, 4, 6, 8, 10, 11, 12, 20]


def tokens_of(length: int, vocab: int = 203, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, length).tolist()
    return tokens


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_reference(open_tiny: OpenTiny, isa: str, name: str) -> None:
    shape = SHAPES[name]
    runner, model = open_tiny(shape, isa=isa)
    tokens = tokens_of(140, shape.vocab)
    expected = model.logits(tokens)
    result, logits = runner.logits(make_batch([(tokens, 0, BLOCKS)], all_rows=True))
    error = np.abs(logits - expected).max() / expected.std()
    # A key or value on the edge of two bf16 numbers may fall the other way than in float64.
    assert error < (0.04 if isa in ROUNDED else 2e-3)
    np.testing.assert_array_equal(result.tokens, logits.argmax(-1))


@pytest.mark.parametrize("name", ["tails", "window", "many-heads", "qwen3"])
def test_decoding_gives_the_bits_of_a_prefill(open_tiny: OpenTiny, isa: str, name: str) -> None:
    shape = SHAPES[name]
    runner, _ = open_tiny(shape, isa=isa)
    tokens = tokens_of(150, shape.vocab)
    _, whole = runner.logits(make_batch([(tokens, 0, BLOCKS)], all_rows=True))
    blocks = [b + 20 for b in BLOCKS]
    runner.execute(make_batch([(tokens[:125], 0, blocks)]))
    for i in range(125, 150):
        _, row = runner.logits(make_batch([([tokens[i]], i, blocks)]))
        np.testing.assert_array_equal(row[0], whole[i])


def test_execute_returns_the_sampled_tokens(open_tiny: OpenTiny) -> None:
    runner, model = open_tiny()
    tokens = tokens_of(30)
    sampled = runner.execute(make_batch([(tokens, 0, [4, 2])])).tokens
    assert sampled.dtype == np.int32
    assert sampled.tolist() == [int(model.logits(tokens)[-1].argmax())]


def test_rows_may_be_any_tokens_in_any_order_or_none(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny()
    tokens = tokens_of(300)
    batch = make_batch([(tokens, 0, list(range(20)))], all_rows=True)
    _, everything = runner.logits(batch)  # more rows than the head computes at once
    some = make_batch([(tokens, 0, list(range(20)))])
    some.logits_rows = np.array([250, 3, 3, 299], np.int32)
    some.sampling = make_batch([([0] * 4, 0, [1])], all_rows=True).sampling
    _, logits = runner.logits(some)
    np.testing.assert_array_equal(logits, everything[[250, 3, 3, 299]])
    none = make_batch([(tokens, 0, list(range(20)))])
    none.logits_rows = np.empty(0, np.int32)
    none.sampling = make_batch([([0], 0, [1])]).sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seeds", "positions"):
        setattr(none.sampling, name, getattr(none.sampling, name)[:0])
    assert runner.execute(none).tokens.shape == (0,)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_any_size_give_the_same(open_tiny: OpenTiny, block_size: int) -> None:
    runner, model = open_tiny(block_size_tokens=block_size)
    tokens = tokens_of(100)
    blocks = [6, 1, 4, 2, 0, 5, 3][: -(-100 // block_size)]
    _, logits = runner.logits(make_batch([(tokens, 0, blocks)], all_rows=True))
    assert np.abs(logits - model.logits(tokens)).max() < 0.2
    other, _ = open_tiny()
    _, expected = other.logits(make_batch([(tokens, 0, BLOCKS)], all_rows=True))
    np.testing.assert_array_equal(logits, expected)


def test_the_number_of_threads_changes_no_bit(open_tiny: OpenTiny, isa: str) -> None:
    tokens = tokens_of(200)
    results = []
    for threads in (1, 2, 5):
        runner, _ = open_tiny(isa=isa, threads=threads)
        _, logits = runner.logits(make_batch([(tokens, 0, BLOCKS)], all_rows=True))
        results.append(logits)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_nothing_of_a_freed_block_is_seen_by_its_next_owner(open_tiny: OpenTiny, isa: str) -> None:
    """A request whose numbers are broken may break itself only."""
    model = NumpyLlama(TinyShape())
    model.tensors["model.embed_tokens.weight"][7] = np.nan
    runner, _ = open_tiny(model, isa=isa)
    healthy = tokens_of(20, 7)  # ids below 7
    expected = runner.logits(make_batch([(healthy, 0, [1, 2])], all_rows=True))[1]
    _, poisoned = runner.logits(make_batch([([7] * 32, 0, [3, 4])]))
    assert np.isnan(poisoned).all()
    _, logits = runner.logits(make_batch([(healthy, 0, [3, 4])], all_rows=True))
    np.testing.assert_array_equal(logits, expected)
    runner.logits(make_batch([([7] * 32, 0, [5, 6])]))
    for i, token in enumerate(healthy):
        _, row = runner.logits(make_batch([([token], i, [5, 6])]))
        np.testing.assert_array_equal(row[0], expected[i])


# The boundary -------------------------------------------------------------------------------------


def setter(name: str, value: Any) -> Callable[[StepBatch], None]:
    return lambda batch: setattr(batch, name, value)


def item(name: str, index: Any, value: Any, of: str = "") -> Callable[[StepBatch], None]:
    def change(batch: StepBatch) -> None:
        array = getattr(getattr(batch, of) if of else batch, name)
        array[index] = value

    return change


def sampling_setter(name: str, value: Any) -> Callable[[StepBatch], None]:
    return lambda batch: setattr(batch.sampling, name, value)


BAD = {
    "token id too large": (item("token_ids", 3, 203), r"token_ids\[3\] is 203, not in \[0, 203\)"),
    "token id negative": (item("token_ids", 0, -1), r"token_ids\[0\] is -1"),
    "position negative": (item("positions", slice(0, 20), range(-1, 19)), "is negative"),
    "position jumps": (item("positions", 2, 9), r"positions\[2\] does not follow"),
    "position too large": (
        item("positions", slice(20, 23), range(510, 513)),
        r"positions\[22\] is 512, not below 512",
    ),
    "seq_lens wrong": (item("seq_lens", 1, 4), r"seq_lens\[1\] is not the last position"),
    "block too large": (item("block_tables", (0, 1), 10**6), r"block_tables\[1\] is 1000000"),
    "block negative": (item("block_tables", (1, 0), -3), r"block_tables\[0\] is -3"),
    "block shared by writers": (item("block_tables", (1, 0), 4), "block 4 is written by two"),
    "block twice in one": (item("block_tables", (0, 1), 4), "block 4 is written by two"),
    "table too narrow": (setter("block_tables", np.zeros((2, 1), np.int32)), "of the 2 needed"),
    "table of one": (setter("block_tables", np.zeros((1, 2), np.int32)), "a row per sequence"),
    "table transposed": (
        setter("block_tables", np.zeros((2, 2), np.int32).T),
        "a row is not contiguous",
    ),
    "table flat": (setter("block_tables", np.zeros(4, np.int32)), "must have 2 dimensions"),
    "query_start falls": (item("query_start", 1, 0), "does not rise"),
    "query_start begins late": (item("query_start", 0, 1), "must begin with 0"),
    "query_start too far": (item("query_start", 1, 30), "exceeds the number of tokens"),
    "query_start short": (setter("query_start", np.array([0, 23], np.int32)), "elements, expected"),
    "query_start misses the end": (item("query_start", 2, 22), "must end with"),
    "logits row too large": (item("logits_rows", 0, 23), r"logits_rows\[0\] is 23"),
    "logits row negative": (item("logits_rows", 0, -1), r"logits_rows\[0\] is -1"),
    "logits rows without params": (
        setter("logits_rows", np.zeros(3, np.int32)),
        "temperature has 2 elements, expected 3",
    ),
    "int64 tokens": (setter("token_ids", np.zeros(23, np.int64)), "token_ids has the wrong dtype"),
    "float positions": (setter("positions", np.zeros(23, np.float32)), "positions has the wrong"),
    "strided tokens": (setter("token_ids", np.zeros(46, np.int32)[::2]), "not C-contiguous"),
    "no tokens": (setter("token_ids", np.zeros(0, np.int32)), "positions has 23 elements"),
    "top_k negative": (item("top_k", 0, -1, "sampling"), r"top_k\[0\] is negative"),
    "top_p zero": (item("top_p", 1, 0.0, "sampling"), r"top_p\[1\]"),
    "top_p nan": (item("top_p", 1, np.nan, "sampling"), r"top_p\[1\]"),
    "min_p above one": (item("min_p", 0, 1.5, "sampling"), r"min_p\[0\]"),
    "temperature nan": (item("temperature", 0, np.nan, "sampling"), r"temperature\[0\]"),
    "temperature infinite": (item("temperature", 0, np.inf, "sampling"), r"temperature\[0\]"),
    "seeds signed": (sampling_setter("seeds", np.zeros(2, np.int64)), "seeds has the wrong dtype"),
    "mask of no row": (sampling_setter("masked_token_ids", [(2, [1])]), "row 2 is not in"),
    "mask of row -1": (sampling_setter("masked_token_ids", [(-1, [1])]), "row -1 is not in"),
    "mask of no token": (sampling_setter("masked_token_ids", [(0, [203])]), "masked_token_ids"),
    "mask far out": (sampling_setter("masked_token_ids", [(0, [2**40])]), "out of range"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_unsound_batch_is_refused_and_changes_nothing(open_tiny: OpenTiny, case: str) -> None:
    change, match = BAD[case]
    runner, _ = open_tiny()
    parts = [(tokens_of(20), 0, [4, 2]), (tokens_of(3, seed=1), 0, [9])]
    _, expected = runner.logits(make_batch(parts))
    batch = make_batch(parts)
    batch.sampling.min_p = batch.sampling.min_p.copy()
    change(batch)
    with pytest.raises(ValueError, match=match):
        runner.execute(batch)
    _, logits = runner.logits(make_batch(parts))
    np.testing.assert_array_equal(logits, expected)


def test_a_step_larger_than_the_limit_is_refused(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny(max_num_batched_tokens=64)
    runner.execute(make_batch([(tokens_of(64), 0, [1, 2, 3, 4])]))
    with pytest.raises(ValueError, match="65 tokens exceeds the limit of 64"):
        runner.execute(make_batch([(tokens_of(65), 0, [1, 2, 3, 4, 5])]))


def test_arrays_may_be_read_only_and_tables_strided(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny()
    parts = [(tokens_of(20), 0, [4, 2]), (tokens_of(30, seed=1), 0, [9, 7])]
    _, expected = runner.logits(make_batch(parts))
    batch = make_batch(parts)
    rows = np.full((2, 50), -7, np.int32)  # what lies past the table is not to be read
    rows[:, :2] = batch.block_tables
    batch.block_tables = rows[:, :2]
    batch.token_ids.flags.writeable = False
    _, logits = runner.logits(batch)
    np.testing.assert_array_equal(logits, expected)


def test_two_threads_cannot_be_in_one_step(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny(SHAPES["smollm2"], isa="portable", threads=1)
    tokens = tokens_of(400)
    outcomes: list[str] = []
    barrier = threading.Barrier(3)

    def step() -> None:
        barrier.wait()
        try:
            runner.execute(make_batch([(tokens, 0, list(range(25)))]))
            outcomes.append("ok")
        except RuntimeError as error:
            outcomes.append(str(error))

    workers = [threading.Thread(target=step) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert "ok" in outcomes
    assert set(outcomes) <= {"ok", "a step is running already"}


def test_a_closed_runner_computes_nothing(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny()
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.execute(make_batch([(tokens_of(3), 0, [1])]))


def test_there_is_no_control_method(open_tiny: OpenTiny) -> None:
    runner, _ = open_tiny()
    with pytest.raises(KeyError):
        runner.call("start_profile", {})


def test_a_model_goes_to_one_runner(extension: Any, open_tiny: OpenTiny) -> None:
    builder = extension.ModelBuilder(
        layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, padded_head_dim=32,
        intermediate=32, vocab=16, positions=8, eps=1e-5, attention_scale=1.0,
    )  # fmt: skip
    options = {"isa": "", "threads": 1, "max_tokens": 8, "num_blocks": 1, "block_size": 16}
    with pytest.raises(ValueError, match="layers are missing"):
        extension.Runner(builder, **options)
