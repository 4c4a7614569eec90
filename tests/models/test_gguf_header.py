from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import tiny_gguf
from trioengine.errors import ConfigError
from trioengine.models.gguf_header import read_gguf_scalars

if TYPE_CHECKING:
    from pathlib import Path

METADATA = {
    "general.architecture": "llama",
    "strings": ["a", "", "é"],
    "numbers": [1, 2, 3],
    "nested": [["a", "b"], ["c"]],
    "flag": True,
    "count": 7,
    "rate": 0.5,
    "after.arrays": "found",
}


def test_scalars_are_found_between_arrays(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", METADATA)
    expected = {key: value for key, value in METADATA.items() if not isinstance(value, list)}
    assert read_gguf_scalars(path) == expected


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" * 20, b"GGUF\x01\0\0\0" * 9])
def test_what_is_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.gguf is not a usable GGUF file"):
        read_gguf_scalars(path)


def test_cut_anywhere_it_is_refused(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "x.gguf", METADATA).read_bytes().rstrip(b"\0")
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            read_gguf_scalars(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_gguf_scalars(tmp_path / "x.gguf")
