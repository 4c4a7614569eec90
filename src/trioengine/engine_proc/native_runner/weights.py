"""Tensors of a checkpoint as numpy arrays over mapped safetensors files; nothing is copied here.

numpy has no bfloat16, so 16-bit floats come as their bits (uint16) with the name of their type.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["BLOCK_BYTES", "Checkpoint", "Tensor"]

MAX_HEADER_BYTES: Final = 100 * 2**20  # the format's own limit
BLOCK_BYTES: Final = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
"""Bytes of 32 weights in GGUF's quantised blocks."""

_DTYPES: Final[dict[str, tuple[str, type[np.generic]]]] = {
    "BF16": ("bf16", np.uint16),
    "F16": ("f16", np.uint16),
    "F32": ("f32", np.float32),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor.

    Attributes:
        kind: ``bf16`` and ``f16`` (bits, uint16), ``f32``, or one of ``BLOCK_BYTES``.
        data: The values, or their bits; blocks as uint8 ``[rows, bytes of a row]``. C-contiguous.
    """

    kind: str
    data: npt.NDArray[Any]

    def as_float32(self) -> npt.NDArray[np.float32]:
        """Return the values, exactly."""
        if self.kind == "bf16":
            return (self.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self.kind == "f16":
            return self.data.view(np.float16).astype(np.float32)
        if self.kind in BLOCK_BYTES:
            return _dequantise(self.kind, self.data)
        return np.ascontiguousarray(self.data, np.float32)

    def as_bf16(self) -> npt.NDArray[np.uint16]:
        """Return the bits of the values rounded to bfloat16, to nearest, ties to even."""
        if self.kind == "bf16":
            return self.data
        bits = self.as_float32().view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16
        return rounded.astype(np.uint16)


def _dequantise(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = data.reshape(len(data), -1, BLOCK_BYTES[kind])
    scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    if kind == "q8_0":
        return (scale * blocks[..., 2:].view(np.int8)).reshape(len(data), -1)
    nibbles = blocks[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32)
    if kind == "q4_0":
        return (scale * (codes - np.float32(8))).reshape(len(data), -1)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    return (scale * codes + minimum).reshape(len(data), -1)


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Checkpoint:
    """The safetensors files of a directory, one file or sharded.

    Raises:
        ConfigError: A file is missing, damaged, or lies about its size.
    """

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        self._tensors: dict[str, Tensor] = {}
        for path in _files(model_dir):
            self._tensors |= _read_file(path)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor that must have this shape.

        Raises:
            ConfigError: There is none, or its shape is another.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._dir}: tensor {name} is missing")
        if tensor.data.shape != shape:
            raise ConfigError(f"{self._dir}: {name} is {tensor.data.shape}, expected {shape}")
        return tensor


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return [model_dir / "model.safetensors"]
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from error
    for name in names:
        if "/" in name or name.startswith("."):
            raise ConfigError(f"{index} names a file outside its directory: {name!r}")
    return [model_dir / name for name in sorted(names)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        raw = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if len(raw) < 8 or length > min(MAX_HEADER_BYTES, len(raw) - 8):
        raise ConfigError(f"{path} is no safetensors file, or is cut short")
    try:
        header = msgspec.json.decode(raw[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: the header is damaged: {error}") from error
    body = raw[8 + length :]
    return {name: _view(path, name, entry, body) for name, entry in entries.items()}


def _view(path: Path, name: str, entry: _Entry, body: npt.NDArray[np.uint8]) -> Tensor:
    kind, dtype = _DTYPES.get(entry.dtype, (entry.dtype, np.uint8))
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= len(body) or any(size < 0 for size in entry.shape):
        raise ConfigError(f"{path}: {name} lies outside the file")
    if entry.dtype not in _DTYPES:  # refused only if it is asked for: its shape fits nothing
        return Tensor(kind, body[begin:end])
    if end - begin != math.prod(entry.shape) * np.dtype(dtype).itemsize:
        raise ConfigError(f"{path}: {name} has not the size of its shape")
    part = body[begin:end]
    if part.ctypes.data % np.dtype(dtype).itemsize:  # the format does not promise alignment
        part = part.copy()
    return Tensor(kind, part.view(dtype).reshape(entry.shape))
