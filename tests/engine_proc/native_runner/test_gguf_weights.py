from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.numpy_gguf import KINDS, dequantise, quantise, write_gguf, write_llama_gguf
from helpers.numpy_llama import NumpyLlama, TinyShape, make_batch, round_bf16
from trioengine.config import EngineOptions
from trioengine.engine_proc import native_runner
from trioengine.engine_proc.native_runner.gguf_weights import GgufCheckpoint
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(3)
WEIGHT = round_bf16(RNG.standard_normal((6, 64)))
NAME = "model.layers.0.mlp.up_proj.weight"


def write(path: Path, kind: str, name: str = "blk.0.ffn_up.weight", **options: Any) -> Path:
    data = quantise(kind, WEIGHT).tobytes()
    return write_gguf(path, {name: (KINDS[kind], WEIGHT.shape, data)}, **options)


def read(path: Path, name: str = NAME) -> Any:
    return GgufCheckpoint(path, num_heads=3, num_kv_heads=1).get(name, 6, 64)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"])
def test_values_come_back(tmp_path: Path, kind: str) -> None:
    tensor = read(write(tmp_path / "a.gguf", kind))
    assert tensor.kind == kind
    expected = WEIGHT
    if kind.startswith("q"):
        expected = dequantise(kind, quantise(kind, WEIGHT))
        step = np.abs(WEIGHT).max() / (127 if kind == "q8_0" else 7)
        assert np.abs(expected - WEIGHT).max() < step
    if kind == "f16":
        expected = WEIGHT.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(tensor.as_float32(), expected)


def test_other_types_are_dequantised_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf.quants import quantize

    kind = gguf.GGMLQuantizationType.Q5_0
    data = quantize(WEIGHT, kind).tobytes()
    path = write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": (kind, WEIGHT.shape, data)})
    tensor = read(path)
    assert tensor.kind == "f32"
    assert np.abs(tensor.data - WEIGHT).max() < 0.2
    assert "Q5_0 is dequantised" in caplog.text


def test_rows_that_rotate_together_are_parted_again(tmp_path: Path) -> None:
    model = NumpyLlama(TinyShape(hidden=64, head_dim=32, heads=3, kv_heads=1, intermediate=64))
    write_llama_gguf(tmp_path / "a.gguf", model, {}, "bf16")
    checkpoint = GgufCheckpoint(tmp_path / "a.gguf", num_heads=3, num_kv_heads=1)
    for part, rows in (("q_proj", 96), ("k_proj", 32), ("v_proj", 32)):
        name = f"model.layers.1.self_attn.{part}.weight"
        np.testing.assert_array_equal(
            checkpoint.get(name, rows, 64).as_float32(), model.tensors[name]
        )
    assert "lm_head.weight" in checkpoint
    assert "model.layers.2.mlp.up_proj.weight" not in checkpoint


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path.write_bytes(b"GGML" + bytes(40)), "does not begin with GGUF"),
        (lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0)), "version is 9"),
        (lambda path: path.write_bytes(b"GGUF"), "not a usable GGUF file"),
        (lambda path: path.write_bytes(b""), "not a usable GGUF file"),
        (lambda path: write(path, "q4_0", architecture="mamba"), "layout of 'mamba'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, make: Any, match: str) -> None:
    make(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=match):
        GgufCheckpoint(tmp_path / "a.gguf", num_heads=1, num_kv_heads=1)


def test_a_tensor_that_is_not_there_or_not_whole_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "q4_0")
    with pytest.raises(ConfigError, match=r"blk.0.ffn_gate.weight is missing"):
        read(path, "model.layers.0.mlp.gate_proj.weight")
    checkpoint = GgufCheckpoint(path, num_heads=3, num_kv_heads=1)
    with pytest.raises(ConfigError, match="expected"):
        checkpoint.get(NAME, 64, 6)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ConfigError, match="lies outside the file"):
        read(path)


@pytest.mark.model  # whose environment has the gguf package, for the kinds of block not read here
@given(data=st.data())
def test_a_damaged_file_is_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("damaged") / "a.gguf", "q4_1")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 320))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    with contextlib.suppress(ConfigError):
        read(path)


# The runner on quantised weights ------------------------------------------------------------------

SHAPE = TinyShape(hidden=96, heads=6, kv_heads=2, head_dim=32, intermediate=128, vocab=200)
MIXES: dict[str, tuple[dict[str, str], str]] = {
    "q4_0": ({}, "q4_0"),
    "q4_1": ({"embed": "q8_0", "lm_head": "q8_0"}, "q4_1"),
    "q8_0": ({}, "q8_0"),
    "f16": ({}, "f16"),
    "mixed": ({"up_proj": "q8_0", "v_proj": "f16", "down": "q8_0", "norm": "f32"}, "q4_0"),
}


def load(directory: Path, isa: str, quantization: str) -> Any:
    options = EngineOptions(
        kv_cache_memory_gib=0.02,
        threads=2,
        quantization=quantization,  # type: ignore[arg-type]  # one of its literals
        engine_args={"isa": isa},
    )
    return native_runner.load(directory, options, lambda *_: None)


def relative_error(runner: Any, model: NumpyLlama) -> float:
    tokens = np.random.default_rng(1).integers(0, 200, 60).tolist()
    expected = model.logits(tokens)
    _, logits = runner.logits(make_batch([(tokens, 0, [3, 1, 4, 2])], all_rows=True))
    _, row = runner.logits(make_batch([(tokens[:-1], 0, [5, 6, 7, 8])]))
    np.testing.assert_array_equal(row[0], logits[-2])  # another number of rows
    error: float = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    return error


@pytest.mark.parametrize("mix", MIXES)
def test_blocks_are_used_as_they_are(tmp_path: Path, isa: str, mix: str) -> None:
    """Only the activations are rounded: 8 bits with a scale per 32 of them."""
    model = NumpyLlama(SHAPE)
    kinds, default = MIXES[mix]
    model.write(tmp_path)
    write_llama_gguf(tmp_path / "model.gguf", model, kinds, default)
    runner = load(tmp_path, isa, "gguf")
    assert "gguf" in runner.model.runner
    assert relative_error(runner, model) < 0.02


@pytest.mark.usefixtures("extension")
def test_blocks_are_used_where_the_user_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = NumpyLlama(SHAPE)
    model.write(tmp_path)
    assert "bfloat16" in load(tmp_path, "portable", "auto").model.runner
    write_llama_gguf(tmp_path / "model.gguf", model, {}, "q8_0")
    assert "gguf" in load(tmp_path, "portable", "auto").model.runner
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "bfloat16" in load(tmp_path, "portable", "auto").model.runner
    (record,) = caplog.records
    assert record.getMessage().startswith("what the GGUF file was converted to is computed instead")


def test_heads_that_are_not_whole_groups_fall_back_to_bf16(tmp_path: Path, isa: str) -> None:
    shape = TinyShape(hidden=64, heads=8, kv_heads=4, head_dim=24, intermediate=64, vocab=200)
    model = NumpyLlama(shape)
    model.write(tmp_path)
    write_llama_gguf(tmp_path / "model.gguf", model, {}, "q8_0")
    assert relative_error(load(tmp_path, isa, "gguf"), model) < 0.02


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.03), ("q4", 0.2)])
def test_weights_are_quantised_while_loading(
    tmp_path: Path, isa: str, quantization: str, bound: float
) -> None:
    model = NumpyLlama(TinyShape())
    model.write(tmp_path)
    error = relative_error(load(tmp_path, isa, quantization), model)
    assert 1e-4 < error < bound


def test_blocks_need_a_file_that_has_them(tmp_path: Path) -> None:
    pytest.importorskip("trioengine.engine_proc.native_runner._native")
    NumpyLlama(TinyShape()).write(tmp_path)
    with pytest.raises(ConfigError, match=r"needs a model that was a GGUF file: no .*model\.gguf"):
        load(tmp_path, "", "gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model.gguf is not a usable GGUF file"):
        load(tmp_path, "", "gguf")
