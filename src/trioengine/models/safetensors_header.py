"""How many weights a checkpoint has, from the headers of its safetensors files."""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["count_weights"]

MAX_HEADER_BYTES: Final = 100 * 2**20  # the format's own limit
_BITS: Final = re.compile(r"[A-Z]+(\d+)")


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]


def count_weights(model_dir: Path) -> tuple[int, int]:
    """Return elements and bytes of all tensors, 0 where there is no safetensors file.

    Raises:
        ConfigError: A file is none of that format.
    """
    num_elements = num_bytes = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        for tensor in _read_header(path):
            elements = math.prod(tensor.shape)
            num_elements += elements
            num_bytes += elements * _bits(tensor.dtype) // 8
    return num_elements, num_bytes


def _read_header(path: Path) -> list[_Tensor]:
    """Return what a file's header lists: eight bytes of length, little-endian, then JSON.

    Source: the format's description, https://github.com/huggingface/safetensors.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = file.read(min(size, MAX_HEADER_BYTES))
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return [msgspec.json.decode(entry, type=_Tensor) for entry in entries.values()]
    except (OSError, struct.error, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no safetensors file: {error}") from error


def _bits(dtype: str) -> int:
    found = _BITS.match(dtype)  # BF16, F32, I8, F8_E4M3 …; BOOL has none
    return int(found.group(1)) if found else 8
