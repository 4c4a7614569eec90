"""Types of the C++ extension; its sources are in ``native/``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Masks = Sequence[tuple[int, Sequence[int]]]
_Arrays = tuple[npt.NDArray[Any], ...]
_Logprobs = tuple[
    npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]
]

class Arena:
    def __init__(self) -> None: ...

class PackedLinear:
    @property
    def format(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def dequantise(self) -> npt.NDArray[np.float32]: ...

class ModelBuilder:
    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        padded_head_dim: int,
        intermediate: int,
        vocab: int,
        positions: int,
        eps: float,
        attention_scale: float,
    ) -> None: ...
    def add_layer(
        self,
        *,
        query: PackedLinear,
        key: PackedLinear,
        value: PackedLinear,
        output: PackedLinear,
        gate_up: PackedLinear,
        down: PackedLinear,
        input_norm: npt.NDArray[np.float32],
        post_norm: npt.NDArray[np.float32],
        query_norm: npt.NDArray[np.float32] | None,
        key_norm: npt.NDArray[np.float32] | None,
        window: int,
        rotate: bool,
    ) -> None: ...
    def set_embedding(self, rows: npt.NDArray[np.uint16]) -> None: ...
    def set_head(self, head: PackedLinear, final_norm: npt.NDArray[np.float32]) -> None: ...
    def set_rotation(self, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32]) -> None: ...
    @property
    def weight_bytes(self) -> int: ...

class Latch:
    def __init__(self, count: int) -> None: ...
    def count_down(self) -> None: ...

class Runner:
    def __init__(
        self,
        model: ModelBuilder,
        *,
        isa: str,
        threads: int,
        max_tokens: int,
        num_blocks: int,
        block_size: int,
    ) -> None: ...
    def execute(
        self,
        token_ids: npt.NDArray[Any],
        positions: npt.NDArray[Any],
        query_start: npt.NDArray[Any],
        seq_lens: npt.NDArray[Any],
        block_tables: npt.NDArray[Any],
        logits_rows: npt.NDArray[Any],
        temperature: npt.NDArray[Any],
        top_p: npt.NDArray[Any],
        top_k: npt.NDArray[Any],
        min_p: npt.NDArray[Any],
        seeds: npt.NDArray[Any],
        sample_positions: npt.NDArray[Any],
        masks: _Masks,
        allow: _Arrays | None,
        allow_filled: Latch | None,
        bias: _Arrays | None,
        penalties: _Arrays | None,
        logprobs_k: npt.NDArray[Any] | None,
        targets: npt.NDArray[Any] | None,
        want_logits: bool,
    ) -> tuple[npt.NDArray[np.int32], _Logprobs | None, npt.NDArray[np.float32] | None]: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

def usable_isas() -> list[str]: ...
def uniform(seed: int, position: int) -> float: ...
def block_bytes(layers: int, kv_heads: int, padded_head_dim: int, block_size: int) -> int: ...
def pack(
    arena: Arena,
    sources: Sequence[npt.NDArray[Any]],
    source_type: str,
    columns: int,
    rows: npt.NDArray[np.int32],
    inputs: npt.NDArray[np.int32] | None,
    bias: npt.NDArray[np.float32] | None,
    format: str,
    outputs: int,
    threads: int,
) -> PackedLinear: ...
def multiply(
    linear: PackedLinear, x: npt.NDArray[np.float32], isa: str
) -> npt.NDArray[np.float32]: ...
def sample(
    logits: npt.NDArray[np.float32],
    temperature: Sequence[float],
    top_p: Sequence[float],
    top_k: Sequence[int],
    min_p: Sequence[float],
    uniforms: Sequence[float],
    masks: _Masks,
    isa: str,
) -> list[int]: ...
