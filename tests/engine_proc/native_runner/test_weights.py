from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.numpy_llama import round_bf16, write_safetensors
from trioengine.engine_proc.native_runner.weights import Checkpoint, Tensor
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.array([[1.0, -2.5, 3.0], [0.0, 1e-20, 65504.0]], np.float32)


def write_raw(
    path: Path, header: dict[str, Any], body: bytes, *, length: int | None = None
) -> None:
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + body)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("dtype", "data", "kind"),
    [
        ("F32", VALUES, "f32"),
        ("F16", VALUES.astype(np.float16), "f16"),
        ("BF16", (round_bf16(VALUES).view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bf16"),
    ],
)
def test_values_come_back(tmp_path: Path, dtype: str, data: Any, kind: str) -> None:
    body = data.tobytes()
    write_raw(tmp_path / "model.safetensors", {"x": entry(dtype, [2, 3], 0, len(body))}, body)
    tensor = Checkpoint(tmp_path).get("x", 2, 3)
    assert tensor.kind == kind
    expected = round_bf16(VALUES) if kind == "bf16" else data.astype(np.float32)
    np.testing.assert_array_equal(tensor.as_float32(), expected)


def test_bf16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8 - 2**-20], np.float32)
    rounded = Tensor("f32", exact).as_bf16()
    back = Tensor("bf16", rounded).as_float32()
    np.testing.assert_array_equal(back, np.array([1.0, 1.0, 1.0 + 2**-6, -1.0 - 2**-7], np.float32))


def test_tensors_are_mapped_and_not_copied(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": VALUES})
    data = Checkpoint(tmp_path).get("x", 2, 3).data
    assert isinstance(data, np.memmap)
    assert not data.flags.writeable


def test_an_unaligned_tensor_is_read(tmp_path: Path) -> None:
    body = b"\0" + VALUES.tobytes()
    write_raw(tmp_path / "model.safetensors", {"x": entry("F32", [2, 3], 1, 25)}, body)
    np.testing.assert_array_equal(Checkpoint(tmp_path).get("x", 2, 3).as_float32(), VALUES)


def test_shards_are_joined(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": VALUES})
    write_safetensors(tmp_path / "b.safetensors", {"y": VALUES})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert "x" in checkpoint
    assert "y" in checkpoint
    assert "z" not in checkpoint


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", ".hidden"])
def test_an_index_does_not_lead_outside(tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"x": name}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="outside its directory"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"x": entry("F32", [2, 3], 0, 25)}, "outside the file"),
        ({"x": entry("F32", [2, 3], -8, 16)}, "outside the file"),
        ({"x": entry("F32", [2, 3], 20, 4)}, "outside the file"),
        ({"x": entry("F32", [-2, -3], 0, 24)}, "outside the file"),
        ({"x": entry("F32", [2, 4], 0, 24)}, "size of its shape"),
        ({"x": entry("F32", [2**40, 2**40], 0, 24)}, "size of its shape"),
        ({"x": {"dtype": "F32"}}, "damaged"),
        ({"x": 3}, "damaged"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: dict[str, Any], match: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, VALUES.tobytes())
    with pytest.raises(ConfigError, match=match):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("length", [2**63, 10**6])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    write_raw(tmp_path / "model.safetensors", {}, b"", length=length)
    with pytest.raises(ConfigError, match="cut short"):
        Checkpoint(tmp_path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint(tmp_path)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": VALUES})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="tensor y is missing"):
        checkpoint.get("y", 1)
    with pytest.raises(ConfigError, match=r"x is \(2, 3\), expected \(3, 2\)"):
        checkpoint.get("x", 3, 2)


def test_an_unknown_type_is_refused_when_asked_for(tmp_path: Path) -> None:
    header = {"x": entry("I64", [2, 3], 0, 48), "y": entry("F32", [2, 3], 48, 72)}
    write_raw(tmp_path / "model.safetensors", header, bytes(48) + VALUES.tobytes())
    checkpoint = Checkpoint(tmp_path)
    checkpoint.get("y", 2, 3)
    with pytest.raises(ConfigError, match="expected"):
        checkpoint.get("x", 2, 3)


@given(data=st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    directory = tmp_path_factory.mktemp("garbage")
    (directory / "model.safetensors").write_bytes(data)
    with contextlib.suppress(ConfigError):
        Checkpoint(directory)
