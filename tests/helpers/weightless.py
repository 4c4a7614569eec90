"""Checkpoints that have a configuration and the headers of their weights, but no weights."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BODY", "TABLE", "checkpoint"]

CONFIG: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TABLE = ("BF16", [10, 8])
BODY = ("BF16", [8, 100])


def checkpoint(model_dir: Path, *files: dict[str, tuple[str, list[int]]], **config: object) -> Path:
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for number, tensors in enumerate(files):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        encoded = json.dumps(header).encode()
        data = struct.pack("<Q", len(encoded)) + encoded
        (model_dir / f"model-{number}.safetensors").write_bytes(data)
    return model_dir
