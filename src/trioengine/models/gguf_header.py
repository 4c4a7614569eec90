"""The scalars at the head of a GGUF file, in milliseconds and without a library.

Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Final

from trioengine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_gguf_scalars"]

Scalar = int | float | bool | str

_FORMATS: Final = "BbHhIif?"  # by value type: u8 i8 u16 i16 u32 i32 f32 bool, then …
_STRING, _ARRAY = 8, 9
_WIDE_FORMATS: Final = {10: "Q", 11: "q", 12: "d"}
_VERSIONS: Final = (2, 3)


def read_gguf_scalars(path: Path) -> dict[str, Scalar]:
    """Return the metadata that are no arrays, such as ``general.architecture``.

    Raises:
        ConfigError: This is no GGUF file, or a damaged one.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).scalars()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"{path} is not a usable GGUF file: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def scalars(self) -> dict[str, Scalar]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._position = 4
        version, _, count = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        found: dict[str, Scalar] = {}
        for _ in range(count):
            key = self._string()
            (kind,) = self._unpack("<I")
            if kind == _ARRAY:
                self._skip_array()
            else:
                found[key] = self._scalar(kind)
        return found

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        (value,) = self._unpack("<" + _format(kind))
        scalar: Scalar = value
        return scalar

    def _skip_array(self) -> None:
        kind, count = self._unpack("<IQ")
        if kind == _ARRAY:
            for _ in range(count):
                self._skip_array()
        elif kind == _STRING:
            for _ in range(count):
                (length,) = self._unpack("<Q")
                self._position += length
        else:
            self._position += count * struct.calcsize("<" + _format(kind))

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise ValueError("it ends within its metadata")
        return self._data[start : self._position].decode()

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values


def _format(kind: int) -> str:
    if kind < len(_FORMATS):
        return _FORMATS[kind]
    if kind in _WIDE_FORMATS:
        return _WIDE_FORMATS[kind]
    raise ValueError(f"it has a value of the unknown type {kind}")
