"""Whatever weights, models and sizes Python hands to the extension: refused, or used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from helpers.numpy_llama import make_batch
from helpers.odd_arrays import REFUSALS, integers, odd_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from hypothesis.strategies import DataObject

    Draw = Callable[..., Any]

BATCH: Final = (
    *("token_ids", "positions", "query_start", "seq_lens", "block_tables", "logits_rows"),
)
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "seeds", "positions")
KINDS: Final = ("bf16", "f16", "f32", "q4_0", "q4_1", "q8_0", "q5_0")
FORMATS: Final = ("bf16", "q8", "q4", "q4_min", "q2")
sizes = st.one_of(st.integers(-1, 70), integers)
index_arrays = st.one_of(
    st.lists(st.integers(-2, 40), max_size=48).map(lambda v: np.array(v, np.int32)),
    st.integers(0, 3).map(lambda n: np.arange(16 * n, dtype=np.int32) % 5),
    odd_arrays(),
)


@st.composite
def sources(draw: st.DrawFn, kind: str, columns: int) -> npt.NDArray[Any]:
    """Mostly arrays that fit, with any bytes in them."""
    if draw(st.integers(0, 5)) == 0:
        return draw(odd_arrays())
    rows = draw(st.integers(0, 20))
    columns = min(max(columns, 0), 200)
    dtype: type[np.generic] = np.uint16
    if kind == "f32":
        dtype = np.float32
    elif kind.startswith("q"):
        columns, dtype = columns // 32 * {"q4_0": 18, "q4_1": 20}.get(kind, 34), np.uint8
    size = rows * columns * np.dtype(dtype).itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, size, np.uint8)
    return raw.view(dtype).reshape(rows, columns)


def pack(extension: Any, draw: Draw) -> Any:
    kind = draw(st.sampled_from(KINDS))
    columns = draw(st.one_of(st.sampled_from([1, 31, 32, 64, 70]), sizes))
    rows = draw(index_arrays)
    outputs = draw(st.one_of(st.just(len(rows) if rows.ndim else 0), sizes))
    return extension.pack(
        extension.Arena(),
        draw(st.lists(sources(kind, columns), max_size=3)),
        kind,
        columns,
        rows,
        draw(st.one_of(st.none(), index_arrays)),
        draw(st.one_of(st.none(), st.just(np.ones(rows.size, np.float32)), odd_arrays())),
        draw(st.sampled_from(FORMATS)),
        outputs,
        draw(st.one_of(st.integers(1, 3), sizes)),
    )


def test_weights_are_not_packed_by_thousands_of_threads(extension: Any) -> None:
    for threads in (0, 1025):
        with pytest.raises(ValueError, match=r"threads must be in \[1, 1024\]"):
            extension.pack(
                extension.Arena(), [np.zeros((16, 32), np.uint16)], "bf16", 32,
                np.arange(16, dtype=np.int32), None, None, "bf16", 16, threads,
            )  # fmt: skip


@pytest.mark.slow
@given(data=st.data())
def test_any_weights_are_packed_or_refused(extension: Any, data: DataObject) -> None:
    with contextlib.suppress(*REFUSALS):
        packed = pack(extension, data.draw)
        meaning = packed.dequantise()
        assert meaning.shape[1] == packed.inputs
        assert packed.outputs <= meaning.shape[0]
        rows = data.draw(st.integers(0, 40))
        isa = data.draw(st.sampled_from(extension.usable_isas()))
        product = extension.multiply(packed, np.ones((rows, packed.inputs), np.float32), isa)
        assert product.shape == (rows, meaning.shape[0])
        extension.multiply(packed, data.draw(odd_arrays()), isa)


SHAPE: Final = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "padded_head_dim": 32,
    "intermediate": 32,
    "vocab": 20,
    "positions": 16,
}


def linear(extension: Any, outputs: int, inputs: int) -> Any:
    weight = np.zeros((outputs, inputs), np.uint16)
    rows = np.full(-(-outputs // 16) * 16, -1, np.int32)
    rows[:outputs] = np.arange(outputs)
    return extension.pack(
        extension.Arena(), [weight], "bf16", inputs, rows, None, None, "bf16", outputs, 1
    )


def build(extension: Any, draw: Draw) -> Any:
    """Build a model of which at most a few things are wrong."""
    shape: dict[str, Any] = dict(SHAPE)
    for name in draw(st.lists(st.sampled_from(sorted(SHAPE)), max_size=2)):
        shape[name] = draw(integers)
    builder = extension.ModelBuilder(**shape, eps=1e-5, attention_scale=draw(st.floats()))
    matrices = {
        "query": (64, 32), "key": (32, 32), "value": (32, 32), "output": (32, 64),
        "gate_up": (64, 32), "down": (32, 32),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(matrices)), max_size=1)):
        matrices[name] = draw(st.sampled_from([(16, 32), (32, 32), (64, 64), (48, 32)]))
    vectors = st.one_of(*[st.just(np.ones(32, np.float32))] * 4, odd_arrays())
    norms = {"input_norm": draw(vectors), "post_norm": draw(vectors)}
    norms |= {name: draw(st.one_of(st.none(), vectors)) for name in ("query_norm", "key_norm")}
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
        parts = {name: linear(extension, *size) for name, size in matrices.items()}
        builder.add_layer(**parts, **norms, window=draw(sizes), rotate=draw(st.booleans()))
    table = np.zeros((16, 16), np.float32)
    builder.set_rotation(table, draw(st.one_of(st.just(table), odd_arrays())))
    builder.set_embedding(draw(st.one_of(st.just(np.zeros((20, 32), np.uint16)), odd_arrays())))
    builder.set_head(linear(extension, draw(st.sampled_from([20, 20, 20, 16])), 32), draw(vectors))
    return builder


@pytest.mark.slow
@given(data=st.data())
def test_any_model_is_built_or_refused(extension: Any, data: DataObject) -> None:
    options = {"threads": 1, "max_tokens": 32, "num_blocks": 3, "block_size": 16}
    for name in data.draw(st.lists(st.sampled_from(sorted(options)), max_size=2)):
        options[name] = data.draw(integers)
    with contextlib.suppress(*REFUSALS, MemoryError):
        builder = build(extension, data.draw)
        assert builder.weight_bytes > 0
        runner = extension.Runner(builder, isa="", **options)
        batch = make_batch([([1, 2, 19], 0, [0])])
        rows = batch.sampling
        runner.execute(
            *(getattr(batch, name) for name in BATCH),
            *(getattr(rows, name) for name in SAMPLING),
            [],
            *([None] * 5),
            True,
        )


def sound_builder(extension: Any, *, head: int = 20, key_norm: int | None = None) -> Any:
    """Build a model of which nothing is wrong but what is asked for."""
    builder = extension.ModelBuilder(**SHAPE, eps=1e-5, attention_scale=1.0)
    parts = {
        "query": (64, 32), "key": (32, 32), "value": (32, 32), "output": (32, 64),
        "gate_up": (64, 32), "down": (32, 32),
    }  # fmt: skip
    ones = np.ones(32, np.float32)
    builder.add_layer(
        **{name: linear(extension, *size) for name, size in parts.items()},
        input_norm=ones, post_norm=ones, query_norm=None,
        key_norm=None if key_norm is None else np.ones(key_norm, np.float32),
        window=0, rotate=True,
    )  # fmt: skip
    builder.set_rotation(np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32))
    builder.set_embedding(np.zeros((20, 32), np.uint16))
    builder.set_head(linear(extension, head, 32), ones)
    return builder


def test_parts_that_almost_fit_are_refused(extension: Any) -> None:
    assert sound_builder(extension, key_norm=32).weight_bytes > 0
    with pytest.raises(ValueError, match="head has not vocab outputs"):
        sound_builder(extension, head=19)  # as many panels as the right one
    with pytest.raises(ValueError, match="key_norm has 16 values, expected 32"):
        sound_builder(extension, key_norm=16)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threads": 0}, "threads must be in"),
        ({"threads": 10**6}, "threads must be in"),
        ({"max_tokens": 2**31 - 1}, "max_tokens must be in"),
        ({"block_size": 2**31 - 16}, "block_size must be"),
        ({"num_blocks": 2**31 - 1, "block_size": 64}, "too many blocks"),
    ],
)
def test_sizes_that_would_overflow_are_refused(
    extension: Any, options: dict[str, int], match: str
) -> None:
    builder = sound_builder(extension)
    good = {"threads": 1, "max_tokens": 32, "num_blocks": 3, "block_size": 16}
    with pytest.raises(ValueError, match=match):
        extension.Runner(builder, isa="", **(good | options))


@given(arguments=st.tuples(integers, integers, integers, integers))
def test_bytes_of_a_block_are_positive_or_refused(
    extension: Any, arguments: tuple[int, int, int, int]
) -> None:
    with contextlib.suppress(*REFUSALS):
        layers, kv_heads, head_dim, block_size = arguments
        expected = 4 * layers * kv_heads * head_dim * block_size
        assert extension.block_bytes(*arguments) == expected


@pytest.mark.slow
@given(data=st.data())
def test_any_logits_are_sampled_or_refused(extension: Any, data: DataObject) -> None:
    """On every instruction set of this machine: to draw them takes longer than to sample."""
    logits, *arguments = anything_to_sample(data.draw)
    for isa in extension.usable_isas():
        note(isa)
        # In place, so each takes its own; but a copy would put an odd array right.
        own = logits.copy() if logits.flags.carray else logits
        with contextlib.suppress(*REFUSALS):
            tokens = extension.sample(own, *arguments, isa)
            assert len(tokens) == len(logits)
            assert all(0 <= token < logits.shape[1] for token in tokens)


def anything_to_sample(draw: Draw) -> tuple[Any, ...]:
    rows, vocab = draw(st.integers(0, 3)), draw(st.integers(0, 200))
    value = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
    some = np.array(draw(st.lists(value, min_size=1, max_size=5)), np.float32)
    logits = draw(st.one_of(st.just(np.resize(some, (rows, vocab))), odd_arrays()))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        drawn: list[Any] = draw(st.lists(values, min_size=rows, max_size=rows))
        return drawn

    return (
        logits,
        *(column(value), column(value), column(integers), column(value), column(value)),
        draw(st.lists(st.tuples(sizes, st.lists(sizes, max_size=3)), max_size=2)),
    )
