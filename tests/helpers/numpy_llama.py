"""A decoder of the Llama family in plain numpy, float64: what the native runner is checked against.

Written from the papers and not from the C++: whole sequences, no cache, no tiles, no fused steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from trioengine.engine_proc.runner import SamplingRows, StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    Float64Array = npt.NDArray[np.float64]

__all__ = ["NumpyLlama", "TinyShape", "greedy_rows", "make_batch", "write_safetensors"]


@dataclasses.dataclass(frozen=True, slots=True)
class TinyShape:
    """A model small enough to compute by hand, with awkward widths by default."""

    model_type: str = "llama"
    layers: int = 2
    hidden: int = 72
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 20
    intermediate: int = 88
    vocab: int = 203
    tied: bool = False
    bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    window: int | None = None
    nope: tuple[int, ...] = ()
    theta: float = 10_000.0
    max_positions: int = 512

    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` that says so."""
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "eos_token_id": 1,
        }
        if self.window is not None:
            config |= {"sliding_window": self.window, "use_sliding_window": True}
            config["max_window_layers"] = 0
        if self.model_type == "mistral" and self.window is None:
            config["sliding_window"] = None
        if self.nope:
            config["no_rope_layers"] = [int(i not in self.nope) for i in range(self.layers)]
        return config


def round_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Round to bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return (rounded.astype(np.uint32) << np.uint32(16)).view(np.float32)


class NumpyLlama:
    """Random weights, exactly representable in bfloat16."""

    def __init__(self, shape: TinyShape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        self.tensors: dict[str, npt.NDArray[np.float32]] = {}
        s = shape
        self._add("model.embed_tokens.weight", (s.vocab, s.hidden), 1.0)
        for i in range(s.layers):
            self._add_layer(f"model.layers.{i}.")
        self._add_norm("model.norm.weight", s.hidden)
        if not s.tied:
            self._add("lm_head.weight", (s.vocab, s.hidden), s.hidden**-0.5)

    def _add_layer(self, prefix: str) -> None:
        s = self.shape
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        for name, rows, columns in (
            ("self_attn.q_proj", queries, s.hidden),
            ("self_attn.k_proj", keys, s.hidden),
            ("self_attn.v_proj", keys, s.hidden),
            ("self_attn.o_proj", s.hidden, queries),
            ("mlp.gate_proj", s.intermediate, s.hidden),
            ("mlp.up_proj", s.intermediate, s.hidden),
            ("mlp.down_proj", s.hidden, s.intermediate),
        ):
            self._add(f"{prefix}{name}.weight", (rows, columns), columns**-0.5)
            has_bias = s.mlp_bias if "mlp" in name else s.bias and "o_proj" not in name
            if has_bias:
                self._add(f"{prefix}{name}.bias", (rows,), 0.5)
        self._add_norm(prefix + "input_layernorm.weight", s.hidden)
        self._add_norm(prefix + "post_attention_layernorm.weight", s.hidden)
        if s.head_norm:
            self._add_norm(prefix + "self_attn.q_norm.weight", s.head_dim)
            self._add_norm(prefix + "self_attn.k_norm.weight", s.head_dim)

    def _add(self, name: str, shape: tuple[int, ...], scale: float) -> None:
        self.tensors[name] = round_bf16(self._rng.standard_normal(shape) * scale)

    def _add_norm(self, name: str, size: int) -> None:
        self.tensors[name] = round_bf16(1.0 + 0.2 * self._rng.standard_normal(size))

    def write(self, directory: Path) -> Path:
        """Write a checkpoint directory and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.shape.config()))
        write_safetensors(directory / "model.safetensors", self.tensors)
        return directory

    def logits(self, token_ids: Sequence[int], *, bf16_cache: bool = True) -> Float64Array:
        """Return ``[len(token_ids), vocab]``.

        Args:
            token_ids: The whole sequence.
            bf16_cache: Round keys and values as the paged cache does.
        """
        w = {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}
        x = w["model.embed_tokens.weight"][list(token_ids)]
        for i in range(self.shape.layers):
            x = x + self._attention(w, i, x, bf16_cache)
            x = x + self._mlp(w, f"model.layers.{i}.", x)
        x = _rms_norm(x, w["model.norm.weight"])
        head = "model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"
        return x @ w[head].T

    def _linear(self, w: dict[str, Float64Array], name: str, x: Float64Array) -> Float64Array:
        out: Float64Array = x @ w[name + ".weight"].T
        return out + w.get(name + ".bias", np.float64(0.0))

    def _mlp(self, w: dict[str, Float64Array], prefix: str, x: Float64Array) -> Float64Array:
        x = _rms_norm(x, w[prefix + "post_attention_layernorm.weight"])
        gate = self._linear(w, prefix + "mlp.gate_proj", x)
        up = self._linear(w, prefix + "mlp.up_proj", x)
        return self._linear(w, prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attention(
        self, w: dict[str, Float64Array], layer: int, x: Float64Array, bf16_cache: bool
    ) -> Float64Array:
        s, prefix, count = self.shape, f"model.layers.{layer}.", len(x)
        x = _rms_norm(x, w[prefix + "input_layernorm.weight"])
        heads = {}
        for name, num in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            y = self._linear(w, f"{prefix}self_attn.{name}_proj", x)
            y = y.reshape(count, num, s.head_dim)
            if s.head_norm and name != "v":
                y = _rms_norm(y, w[f"{prefix}self_attn.{name}_norm.weight"])
            if name != "v" and layer not in s.nope:
                y = self._rotate(y)
            heads[name] = round_bf16(y).astype(np.float64) if bf16_cache and name != "q" else y
        group = s.heads // s.kv_heads
        keys, values = (np.repeat(heads[name], group, axis=1) for name in "kv")
        scores = np.einsum("qhd,khd->hqk", heads["q"], keys) / math.sqrt(s.head_dim)
        distance = np.arange(count)[:, None] - np.arange(count)
        hidden = distance < 0
        if s.window is not None:
            hidden |= distance >= s.window
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, values).reshape(count, -1)
        return self._linear(w, prefix + "self_attn.o_proj", out)

    def _rotate(self, x: Float64Array) -> Float64Array:
        half = self.shape.head_dim // 2
        frequencies = self.shape.theta ** (-np.arange(half) / half)
        angles = np.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rms_norm(x: Float64Array, weight: Float64Array) -> Float64Array:
    normed: Float64Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return normed


def write_safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write tensors as bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, offset = [], 0
    for name, tensor in tensors.items():
        data = (round_bf16(tensor).view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
        end = offset + len(data)
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        parts.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def greedy_rows(positions: Sequence[int]) -> SamplingRows:
    """Ask for the likeliest token of each row, at these positions of their sequences."""
    n = len(positions)
    zeros = np.zeros(n, np.float32)
    return SamplingRows(
        temperature=zeros,
        top_p=zeros + np.float32(1),
        top_k=np.zeros(n, np.int32),
        min_p=zeros,
        seeds=np.zeros(n, np.uint64),
        positions=np.array(positions, np.int64),
        request_ids=np.arange(n, dtype=np.int64),
        all_greedy=True,
        masked_token_ids=[],
    )


def make_batch(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    all_rows: bool = False,
) -> StepBatch:
    """Build a step.

    Args:
        parts: Per sequence: the tokens of this step, the position of the first, the block table.
        all_rows: Ask for the logits of every token instead of each sequence's last.
    """
    counts = [len(tokens) for tokens, _, _ in parts]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    width = max(len(blocks) for _, _, blocks in parts)
    tables = np.zeros((len(parts), width), np.int32)
    for row, (_, _, blocks) in zip(tables, parts, strict=True):
        row[: len(blocks)] = blocks
    positions = np.concatenate(
        [np.arange(start, start + len(tokens), dtype=np.int32) for tokens, start, _ in parts]
    )
    rows = np.arange(starts[-1], dtype=np.int32) if all_rows else starts[1:] - np.int32(1)
    return StepBatch(
        token_ids=np.concatenate([np.array(tokens, np.int32) for tokens, _, _ in parts]),
        positions=positions,
        query_start=starts,
        seq_lens=np.array([start + len(tokens) for tokens, start, _ in parts], np.int32),
        block_tables=tables,
        logits_rows=rows,
        sampling=greedy_rows([int(positions[row]) + 1 for row in rows]),
    )
