"""What the headers of safetensors files say about a checkpoint."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from trioengine.errors import ConfigError
from trioengine.models.safetensors_header import count_weights

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_all_files_count(tmp_path: Path) -> None:
    write(
        tmp_path / "model-1.safetensors",
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
            "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
        },
    )
    write(
        tmp_path / "model-2.safetensors",
        {"c": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [0, 5]}},
    )
    assert count_weights(tmp_path) == (12 + 1 + 5, 24 + 4 + 5)


def test_no_file_is_no_weights(tmp_path: Path) -> None:
    assert count_weights(tmp_path) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 9) + b"{", b"\xff" * 64])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        count_weights(tmp_path)
