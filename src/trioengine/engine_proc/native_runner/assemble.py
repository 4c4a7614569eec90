"""From a checkpoint's tensors to packed weights: which row goes where, and what is padded.

Theory of operation
-------------------
The kernels want heads padded to a multiple of 32 dimensions and, for queries and keys, the two
halves that rotate together each padded to half of that. Padding is zero weights, so padded
dimensions are zero everywhere and change no sum. The order of dimensions within a head is the same
for queries and keys, so their products are what they were. Gate and up projection are interleaved
in runs of 16, so that a kernel has both when it applies SwiGLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from trioengine.engine_proc.native_runner import _native
from trioengine.engine_proc.native_runner.weights import BLOCK_BYTES, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from trioengine.engine_proc.native_runner.config import ModelConfig

    Int32Array = npt.NDArray[np.int32]

__all__ = ["TensorSource", "build_model", "padded_head_dim"]

LANES: Final = 16
GROUP: Final = 32
_FORMATS: Final = {"none": ("bf16", "bf16"), "int8": ("q8", "q8"), "q4": ("q4_min", "q8")}
"""Formats of layers and head. Rounding the head to 4 bits would cost more than its size saves."""
_BLOCK_FORMATS: Final = {"q4_0": "q4", "q4_1": "q4_min", "q8_0": "q8"}


class TensorSource(Protocol):
    """Where tensors come from, by their names in transformers' Llama."""

    def __contains__(self, name: str) -> bool:
        """Say whether there is such a tensor."""

    def get(self, name: str, *shape: int) -> Tensor:
        """Return it; raises ``ConfigError`` where it is missing or has another shape."""


def padded_head_dim(head_dim: int) -> int:
    """Return the dimensions that a head takes in memory."""
    return _round_up(head_dim, GROUP)


def build_model(
    config: ModelConfig,
    source: TensorSource,
    *,
    quantization: str,
    max_model_len: int,
    threads: int,
    progress: Callable[[float], None],
) -> _native.ModelBuilder:
    """Pack all weights.

    Args:
        config: Shape of the model.
        source: Its tensors. Quantised blocks are used as they are where nothing within them has to
            move.
        quantization: Of matrices that are not quantised yet, ``none``, ``int8`` or ``q4``.
        max_model_len: Positions to rotate.
        threads: That pack.
        progress: Told the fraction of layers that are done.

    Raises:
        ConfigError: A tensor is missing or has the wrong shape.
    """
    builder = _native.ModelBuilder(
        layers=len(config.layers),
        hidden=config.hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        padded_head_dim=padded_head_dim(config.head_dim),
        intermediate=_round_up(config.intermediate, GROUP),
        vocab=config.vocab_size,
        positions=max_model_len,
        eps=config.norm_eps,
        attention_scale=config.head_dim**-0.5,
    )
    packer = _Packer(config, source, quantization, threads)
    for index in range(len(config.layers)):
        packer.add_layer(builder, index)
        progress((index + 1) / (len(config.layers) + 1))
    packer.add_ends(builder)
    cos, sin = config.rope.tables(max_model_len)
    half = padded_head_dim(config.head_dim) // 2
    builder.set_rotation(_pad_columns(cos, half), _pad_columns(sin, half))
    return builder


class _Packer:
    def __init__(
        self, config: ModelConfig, source: TensorSource, quantization: str, threads: int
    ) -> None:
        self._config = config
        self._source = source
        self._threads = threads
        self._arena = _native.Arena()
        self._layer_format, self._head_format = _FORMATS[quantization]
        c = config
        self._hidden_rows = _padded(np.arange(c.hidden), _round_up(c.hidden, GROUP))
        self._query_rows = _head_rows(c.num_heads, c.head_dim, split=True)
        self._key_rows = _head_rows(c.num_kv_heads, c.head_dim, split=True)
        self._value_rows = _head_rows(c.num_kv_heads, c.head_dim, split=False)
        self._output_inputs = _head_rows(c.num_heads, c.head_dim, split=False)
        self._gate_up_rows = _interleaved_rows(c.intermediate)

    def add_layer(self, builder: _native.ModelBuilder, index: int) -> None:
        c, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        gate_up = [mlp + "gate_proj", mlp + "up_proj"]
        needs_map = len(self._output_inputs) != queries
        builder.add_layer(
            query=self._pack([attention + "q_proj"], queries, c.hidden, self._query_rows),
            key=self._pack([attention + "k_proj"], keys, c.hidden, self._key_rows),
            value=self._pack([attention + "v_proj"], keys, c.hidden, self._value_rows),
            output=self._pack(
                [attention + "o_proj"],
                c.hidden,
                queries,
                self._hidden_rows,
                self._output_inputs if needs_map else None,
            ),
            gate_up=self._pack(gate_up, c.intermediate, c.hidden, self._gate_up_rows),
            down=self._pack([mlp + "down_proj"], c.hidden, c.intermediate, self._hidden_rows),
            input_norm=self._norm(prefix + "input_layernorm.weight"),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            query_norm=self._head_norm(attention + "q_norm.weight"),
            key_norm=self._head_norm(attention + "k_norm.weight"),
            window=c.layers[index].window,
            rotate=c.layers[index].rotate,
        )

    def add_ends(self, builder: _native.ModelBuilder) -> None:
        """Add the embedding, the last norm and the head."""
        c, source = self._config, self._source
        embedding = source.get("model.embed_tokens.weight", c.vocab_size, c.hidden)
        builder.set_embedding(np.ascontiguousarray(embedding.as_bf16()))
        tied = c.tied if c.tied is not None else "lm_head.weight" not in source
        name = "model.embed_tokens" if tied else "lm_head"
        rows = _padded(np.arange(c.vocab_size), _round_up(c.vocab_size, LANES))
        head = self._pack([name], c.vocab_size, c.hidden, rows, is_head=True)
        builder.set_head(head, self._norm("model.norm.weight"))

    def _pack(
        self,
        names: list[str],
        num_rows: int,
        num_columns: int,
        rows: Int32Array,
        inputs: Int32Array | None = None,
        *,
        is_head: bool = False,
    ) -> _native.PackedLinear:
        """Pack one matrix, or several stacked ones, ``rows[i]`` of which becomes output ``i``."""
        parts = [self._source.get(name + ".weight", num_rows, num_columns) for name in names]
        if len({part.kind for part in parts}) > 1:
            parts = [Tensor("f32", part.as_float32()) for part in parts]
        kind = parts[0].kind
        chosen = self._head_format if is_head else self._layer_format
        if kind in BLOCK_BYTES:
            chosen = "bf16" if inputs is not None else _BLOCK_FORMATS[kind]
        return _native.pack(
            self._arena,
            [np.ascontiguousarray(part.data) for part in parts],
            kind,
            num_columns,
            rows,
            inputs,
            self._bias(names, num_rows, rows),
            chosen,
            num_rows if is_head else len(rows),
            self._threads,
        )

    def _bias(
        self, names: list[str], num_rows: int, rows: Int32Array
    ) -> npt.NDArray[np.float32] | None:
        found = [name + ".bias" for name in names if name + ".bias" in self._source]
        if not found:
            return None
        stacked = np.concatenate(
            [self._source.get(name + ".bias", num_rows).as_float32() for name in names]
        )
        return np.where(rows >= 0, stacked[rows], np.float32(0.0))

    def _norm(self, name: str) -> npt.NDArray[np.float32]:
        weight = self._source.get(name, self._config.hidden).as_float32()
        return _take(weight, self._hidden_rows)

    def _head_norm(self, name: str) -> npt.NDArray[np.float32] | None:
        if name not in self._source:
            return None
        weight = self._source.get(name, self._config.head_dim).as_float32()
        return _take(weight, _head_rows(1, self._config.head_dim, split=True))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded(rows: npt.NDArray[Any], length: int) -> Int32Array:
    out = np.full(length, -1, np.int32)
    out[: len(rows)] = rows
    return out


def _take(values: npt.NDArray[np.float32], rows: Int32Array) -> npt.NDArray[np.float32]:
    return np.where(rows >= 0, values[rows], np.float32(0.0))


def _head_rows(num_heads: int, head_dim: int, *, split: bool) -> Int32Array:
    """Return the source row of each output of padded heads, -1 for padding.

    Args:
        num_heads: Heads, one after the other.
        head_dim: Rows of one head in the source.
        split: Pad each half of a head by itself.
    """
    padded, half = padded_head_dim(head_dim), head_dim // 2
    rows = np.full((num_heads, padded), -1, np.int32)
    first = np.arange(num_heads, dtype=np.int32)[:, None] * head_dim
    if split:
        rows[:, :half] = first + np.arange(half)
        rows[:, padded // 2 : padded // 2 + half] = first + half + np.arange(half)
    else:
        rows[:, :head_dim] = first + np.arange(head_dim)
    return rows.reshape(-1)


def _interleaved_rows(intermediate: int) -> Int32Array:
    """Return gate rows 0..15, up rows 0..15, gate rows 16..31, … of the two stacked matrices."""
    padded = _round_up(intermediate, GROUP)
    gate = _padded(np.arange(intermediate), padded).reshape(-1, 1, LANES)
    up = _padded(np.arange(intermediate) + intermediate, padded).reshape(-1, 1, LANES)
    return np.concatenate([gate, up], axis=1).reshape(-1)


def _pad_columns(table: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
    out = np.zeros((len(table), width), np.float32)
    out[:, : table.shape[1]] = table
    return out
