"""Tensors of a GGUF file, under transformers' names; quantised blocks stay as they are.

Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3), and the
block layouts of ggml-quants.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trioengine.engine_proc.native_runner.weights import BLOCK_BYTES, Tensor
from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["GgufCheckpoint"]

ARCHITECTURES: Final = frozenset({"llama", "qwen2", "qwen3"})
_PERMUTED: Final = frozenset({"llama"})  # whose query and key rows GGUF keeps in another order
_NATIVE: Final = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 8: "q8_0", 30: "bf16"}
_PLAIN_DTYPES: Final[dict[str, type[np.generic]]] = {
    "f32": np.float32,
    "f16": np.uint16,
    "bf16": np.uint16,
}
_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies; ``shape`` is outermost first."""

    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufCheckpoint:
    """A GGUF file as a source of tensors.

    Args:
        path: The file.
        num_heads: Query heads of the model; needed to undo GGUF's order of rows.
        num_kv_heads: Key and value heads.

    Raises:
        ConfigError: The file is damaged, or its architecture's names are not known.
    """

    def __init__(self, path: Path, *, num_heads: int, num_kv_heads: int) -> None:
        self._path = path
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        try:
            self._raw = np.memmap(path, np.uint8, mode="r")
            reader = _Reader(self._raw)
            self._entries = reader.tensors()
        except (OSError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ConfigError(f"{path} is not a usable GGUF file: {error}") from error
        self._body, self._architecture = reader.body, reader.architecture
        if self._architecture not in ARCHITECTURES:
            raise ConfigError(f"{path}: the layout of {self._architecture!r} is not known")

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._entries

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor that must have this shape; see ``TensorSource``."""
        entry = self._entries.get(_gguf_name(name))
        if entry is None:
            raise ConfigError(f"{self._path}: tensor {_gguf_name(name)} is missing")
        if entry.shape != shape:
            raise ConfigError(f"{self._path}: {name} is {entry.shape}, expected {shape}")
        tensor = self._read(name, entry)
        part = name.rsplit(".", 2)[-2]
        if self._architecture in _PERMUTED and part in self._heads:
            return _undo_permutation(tensor, self._heads[part])
        return tensor

    def _read(self, name: str, entry: _Entry) -> Tensor:
        kind = _NATIVE.get(entry.kind)
        if kind is None:
            return self._dequantise(name, entry)
        if kind in _PLAIN_DTYPES:
            dtype = _PLAIN_DTYPES[kind]
            size = math.prod(entry.shape) * np.dtype(dtype).itemsize
            return Tensor(kind, self._bytes(name, entry, size).view(dtype).reshape(entry.shape))
        rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
        if columns % 32:
            raise ConfigError(f"{self._path}: {name} has {columns} columns, not whole blocks")
        width = columns // 32 * BLOCK_BYTES[kind]
        return Tensor(kind, self._bytes(name, entry, rows * width).reshape(rows, width))

    def _dequantise(self, name: str, entry: _Entry) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(entry.kind)
            block, size = GGML_QUANT_SIZES[kind]
            width = entry.shape[-1] // block * size
            data = self._bytes(name, entry, math.prod(entry.shape[:-1]) * width)
            values = dequantize(np.asarray(data).reshape(*entry.shape[:-1], width), kind)
        except (KeyError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"{self._path}: {name} cannot be read: {error}") from error
        log.warning("%s of %s is dequantised to bfloat16", name, kind.name)
        return Tensor("f32", np.ascontiguousarray(values, np.float32))

    def _bytes(self, name: str, entry: _Entry, size: int) -> npt.NDArray[np.uint8]:
        begin = self._body + entry.offset
        if begin + size > len(self._raw):
            raise ConfigError(f"{self._path}: {name} lies outside the file")
        return self._raw[begin : begin + size]


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if layer := _LAYER.fullmatch(stem):
        return f"blk.{layer[1]}.{_LAYER_NAMES.get(layer[2], layer[2])}.{suffix}"
    return f"{_NAMES.get(stem, stem)}.{suffix}"


def _undo_permutation(tensor: Tensor, num_heads: int) -> Tensor:
    """Put the rows of each head back: GGUF keeps the two that rotate together side by side."""
    rows = len(tensor.data)
    order = np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2)
    return Tensor(tensor.kind, tensor.data[order.swapaxes(1, 2).reshape(-1)])


class _Reader:
    """Walks over the head of the file; every length is checked against what is left."""

    _SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    _STRING, _ARRAY = 8, 9

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        self._data = raw.data  # a view: the file stays mapped, not copied
        self._position = 4
        self._alignment = 32
        self.architecture = ""
        self.body = 0

    def tensors(self) -> dict[str, _Entry]:
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_keys = self._unpack("<IQQ")
        if version not in {2, 3}:
            raise ValueError(f"its version is {version}")
        for _ in range(num_keys):
            self._key()
        entries = dict(self._entry() for _ in range(num_tensors))
        self.body = -(-self._position // self._alignment) * self._alignment
        return entries

    def _key(self) -> None:
        key = self._string()
        (kind,) = self._unpack("<I")
        if key == "general.architecture" and kind == self._STRING:
            self.architecture = self._string()
        elif key == "general.alignment" and kind == 4:
            (self._alignment,) = self._unpack("<I")
            if self._alignment == 0:
                raise ValueError("its alignment is 0")
        else:
            self._skip(kind)

    def _entry(self) -> tuple[str, _Entry]:
        name = self._string()
        (rank,) = self._unpack("<I")
        if rank > 4:
            raise ValueError(f"{name} has {rank} dimensions")
        shape = self._unpack(f"<{rank}Q")[::-1]
        kind, offset = self._unpack("<IQ")
        return name, _Entry(kind, tuple(shape), offset)

    def _skip(self, kind: int) -> None:
        if kind == self._ARRAY:
            inner, count = self._unpack("<IQ")
            if inner in self._SCALARS:
                self._advance(count * self._SCALARS[inner])
            else:
                for _ in range(count):
                    self._skip(inner)
        elif kind == self._STRING:
            (length,) = self._unpack("<Q")
            self._advance(length)
        elif kind in self._SCALARS:
            self._advance(self._SCALARS[kind])
        else:
            raise ValueError(f"it has a value of the unknown type {kind}")

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start = self._position
        self._advance(length)
        return bytes(self._data[start : self._position]).decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._advance(struct.calcsize(layout))
        return values

    def _advance(self, count: int) -> None:
        self._position += count
        if self._position > len(self._data):
            raise ValueError("it ends within its head")
