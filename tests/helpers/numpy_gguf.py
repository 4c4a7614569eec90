"""Quantised blocks and GGUF files in numpy, written from the format's description.

Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from helpers.numpy_llama import NumpyLlama

    Float32Array = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

__all__ = ["KINDS", "dequantise", "quantise", "write_gguf", "write_llama_gguf"]

KINDS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.o_proj.": "attn_output.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}


def quantise(kind: str, weight: Float32Array) -> Bytes:
    """Return the blocks of a matrix whose columns are a multiple of 32, ``[rows, row bytes]``."""
    rows = len(weight)
    if kind in {"f32", "f16", "bf16"}:
        return _plain(kind, weight)
    groups = weight.reshape(rows, -1, 32).astype(np.float32)
    if kind == "q8_0":
        scale = _half(np.abs(groups).max(-1, keepdims=True) / 127)
        codes = np.rint(groups / _nonzero(scale)).astype(np.int8).view(np.uint8)
        return _join(rows, _bits(scale), codes)
    low = groups.min(-1, keepdims=True)
    if kind == "q4_1":
        scale, low = _half((groups.max(-1, keepdims=True) - low) / 15), _half(low)
        return _join(rows, _bits(scale), _bits(low), _nibbles((groups - low) / _nonzero(scale)))
    peak = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = _half(peak / -8)
    return _join(rows, _bits(scale), _nibbles(groups / _nonzero(scale) + 8))


def dequantise(kind: str, data: Bytes) -> Float32Array:
    """Return what blocks mean, float32 ``[rows, columns]``."""
    size = {"q4_0": 18, "q4_1": 20, "q8_0": 34}[kind]
    blocks = data.reshape(len(data), -1, size)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == "q8_0":
        return (scale * blocks[..., 2:].view(np.int8)).reshape(len(data), -1)
    low, high = blocks[..., -16:] & 15, blocks[..., -16:] >> 4
    codes = np.concatenate([low, high], -1).astype(np.float32)
    if kind == "q4_0":
        return (scale * (codes - 8)).astype(np.float32).reshape(len(data), -1)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    values: Float32Array = scale * codes + minimum
    return values.reshape(len(data), -1)


def _plain(kind: str, weight: Float32Array) -> Bytes:
    if kind == "bf16":
        data: Any = (weight.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        data = weight.astype(np.float16 if kind == "f16" else np.float32)
    raw: Bytes = np.ascontiguousarray(data).view(np.uint8)
    return raw.reshape(len(weight), -1)


def _nonzero(scale: Float32Array) -> Float32Array:
    return np.where(scale == 0, np.float32(1), scale)


def _half(values: npt.NDArray[Any]) -> Float32Array:
    return values.astype(np.float16).astype(np.float32)


def _bits(values: Float32Array) -> Bytes:
    raw: Bytes = values.astype(np.float16).view(np.uint8)
    pairs: Bytes = raw.reshape(*values.shape[:-1], 2)
    return pairs


def _nibbles(codes: npt.NDArray[Any]) -> Bytes:
    rounded = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    packed: Bytes = rounded[..., :16] | (rounded[..., 16:] << 4)
    return packed


def _join(rows: int, *parts: Bytes) -> Bytes:
    return np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(rows, -1))


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    architecture: str = "llama",
) -> Path:
    """Write a file of tensors: GGUF type, shape with the innermost dimension last, bytes."""
    words = [b"alpha", b"beta"]
    keys = [
        _string(b"general.architecture") + struct.pack("<I", 8) + _string(architecture.encode()),
        _string(b"general.alignment") + struct.pack("<II", 4, 64),
        _string(b"tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, len(words))
        + b"".join(map(_string, words)),
        _string(b"tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        _string(b"llama.rope.freq_base") + struct.pack("<If", 6, 10_000.0),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += _string(name.encode()) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 64)
    path.write_bytes(head + bytes(-len(head) % 64) + body)
    return path


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def write_llama_gguf(path: Path, model: NumpyLlama, kinds: dict[str, str], default: str) -> None:
    """Write a model as GGUF, and make the model mean what the file's blocks mean.

    Args:
        path: The file.
        model: Its matrices are replaced by what was written.
        kinds: Types of the tensors whose name contains the key.
        default: Type of every other matrix.
    """
    s, entries = model.shape, {}
    for name, tensor in model.tensors.items():
        kind = "f32"
        if tensor.ndim == 2:
            kind = next((k for part, k in kinds.items() if part in name), default)
        matrix = tensor.reshape(-1, tensor.shape[-1])
        data = quantise(kind, matrix)
        if kind.startswith("q"):
            model.tensors[name] = dequantise(kind, data).reshape(tensor.shape)
        if "q_proj" in name or "k_proj" in name:
            data = _permute(data, s.heads if "q_proj" in name else s.kv_heads)
        short = name
        for long, abbreviation in _NAMES.items():
            short = short.replace(long, abbreviation)
        entries[short] = (KINDS[kind], tensor.shape, data.tobytes())
    write_gguf(path, entries)


def _permute(data: Bytes, heads: int) -> Bytes:
    """Put the two rows of a head that rotate together side by side, as GGUF's Llama has them."""
    rows = len(data)
    order = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
    return np.ascontiguousarray(data[order])
