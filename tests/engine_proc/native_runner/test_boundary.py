"""Whatever Python hands to the extension: a clean refusal or a clean result, never a crash.

What these find they find best under the sanitizers (``nox -s sanitizers``), where a read or write
beyond an array ends the process.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from helpers.numpy_llama import TinyShape, greedy_rows, make_batch
from trioengine.engine_proc.runner import NO_TOKEN, AllowMasks, LogitBias, Penalties

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from hypothesis.strategies import DataObject

    from helpers.native_fixtures import OpenTiny
    from trioengine.engine_proc.runner import StepBatch

    Draw = Callable[..., Any]

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
REFUSALS: Final = (ValueError, TypeError)  # TypeError: no array at all, or one that numpy keeps
DTYPES: Final = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "bool", ">i4", "O", "M8[s]", "S4"),
)

integers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(
        [sign * 2**power + off for power in (4, 31, 32, 63) for sign in (-1, 1) for off in (-1, 0)]
    ).filter(lambda value: -(2**63) <= value < 2**63),
)


@st.composite
def odd_arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> npt.NDArray[Any]:
    """Arrays of any type, shape and layout in memory."""
    shape = draw(array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=24))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    laid: npt.NDArray[Any] = draw(st.sampled_from(LAYOUTS))(array)
    return laid


def misaligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype == object or array.size == 0:
        return array
    raw = np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1)
    return raw.reshape(array.shape)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def field_of_records(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give it strides that are no multiple of its items."""
    if array.dtype == object:
        return array
    records = np.zeros(array.shape, [("value", array.dtype), ("other", "u1")])
    records["value"] = array
    field: npt.NDArray[Any] = records["value"]
    return field


LAYOUTS: Final = (
    lambda array: array,
    lambda array: array.T,
    lambda array: array[..., ::-1] if array.ndim else array,
    lambda array: np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
    lambda array: np.broadcast_to(array, (3, *array.shape)),
    lambda array: np.asfortranarray(array),
    misaligned,
    read_only,
    field_of_records,
)


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
def test_any_batch_is_computed_or_refused(open_tiny: OpenTiny, isa: str, shape: TinyShape) -> None:
    runner, _ = open_tiny(shape, isa=isa, max_num_batched_tokens=MAX_TOKENS)
    healthy = [(list(range(30)), 0, [20, 21]), (list(range(10)), 0, [22])]
    expected = runner.logits(make_batch(healthy, all_rows=True))[1]

    @given(batch=broken_batches())
    def check(batch: StepBatch) -> None:
        with contextlib.suppress(*REFUSALS):
            result, logits = runner.logits(batch)
            assert logits.shape == (len(batch.logits_rows), VOCAB)
            assert ((result.tokens >= NO_TOKEN) & (result.tokens < VOCAB)).all()
        after = runner.logits(make_batch(healthy, all_rows=True))[1]
        np.testing.assert_array_equal(after.view(np.uint32), expected.view(np.uint32))

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


# Weights and models -------------------------------------------------------------------------------

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
    builder = extension.ModelBuilder(**SHAPE, eps=1e-5, attention_scale=1.0)
    parts = {
        "query": (64, 32), "key": (32, 32), "value": (32, 32), "output": (32, 64),
        "gate_up": (64, 32), "down": (32, 32),
    }  # fmt: skip
    ones = np.ones(32, np.float32)
    builder.add_layer(
        **{name: linear(extension, *size) for name, size in parts.items()},
        input_norm=ones, post_norm=ones, query_norm=None, key_norm=None, window=0, rotate=True,
    )  # fmt: skip
    builder.set_rotation(np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32))
    builder.set_embedding(np.zeros((20, 32), np.uint16))
    builder.set_head(linear(extension, 20, 32), ones)
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
def test_any_logits_are_sampled_or_refused(extension: Any, isa: str) -> None:
    @given(data=st.data())
    def check(data: DataObject) -> None:
        with contextlib.suppress(*REFUSALS):
            sample_anything(extension, isa, data.draw)

    check()


def sample_anything(extension: Any, isa: str, draw: Draw) -> None:
    rows, vocab = draw(st.integers(0, 3)), draw(st.integers(0, 200))
    value = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
    some = np.array(draw(st.lists(value, min_size=1, max_size=5)), np.float32)
    logits = draw(st.one_of(st.just(np.resize(some, (rows, vocab))), odd_arrays()))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        drawn: list[Any] = draw(st.lists(values, min_size=rows, max_size=rows))
        return drawn

    tokens = extension.sample(
        logits,
        *(column(value), column(value), column(integers), column(value), column(value)),
        draw(st.lists(st.tuples(sizes, st.lists(sizes, max_size=3)), max_size=2)),
        isa,
    )
    assert len(tokens) == len(logits)
    assert all(0 <= token < logits.shape[1] for token in tokens)
